import itertools

import numpy as np
import pytest
from exact_outcomes import moments, position_outcomes
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_stochdpo.config import POSITION_SAMPLERS, PruningPlan
from ds_stochdpo.pruning.positions import block_edges, inclusion_probs, num_uniforms, sample_positions

T = 6
LOG_RATIOS = np.array([0.9, -0.4, 0.3, 0.7, -1.1, 0.2])
RATES = [0.5, 1 / 3, 0.37, 0.9, 0.05]


def plan_of(sampler, keep):
    return PruningPlan(position_sampler=sampler, position_keep=keep)


@pytest.mark.parametrize("keep", [*RATES, 1.0])
@pytest.mark.parametrize("sampler", POSITION_SAMPLERS)
def test_inclusion_probabilities_are_exact(sampler, keep):
    drawn = np.zeros(T)
    for prob, uniforms in position_outcomes(sampler, keep, [T]):
        positions, inclusion_prob = sample_positions(sampler, T, keep, uniforms)
        drawn[positions] += prob
        np.testing.assert_array_equal(inclusion_prob, inclusion_probs(sampler, T, keep)[positions])
    np.testing.assert_allclose(drawn, inclusion_probs(sampler, T, keep), atol=1e-12)


@pytest.mark.parametrize("keep", RATES)
@pytest.mark.parametrize("sampler", POSITION_SAMPLERS)
def test_weighted_sum_is_unbiased(sampler, keep):
    mean, _ = moments(plan_of(sampler, keep), [LOG_RATIOS])
    assert mean == pytest.approx(LOG_RATIOS.sum(), abs=1e-12)


@pytest.mark.parametrize("keep", RATES)
def test_variance_formulas(keep):
    """METHOD.md M7: bernoulli, fixed and stratified in closed form."""
    r = LOG_RATIOS
    n = max(1, round(keep * T))
    blocks = [r[a:b] for a, b in itertools.pairwise(block_edges(T, keep))]
    expected = {
        "bernoulli": (1 - keep) / keep * (r**2).sum(),
        "fixed": T**2 * (1 - n / T) / n * r.var(ddof=1),
        "stratified": sum(len(b) * ((b - b.mean()) ** 2).sum() for b in blocks),
    }
    for sampler, variance in expected.items():
        assert moments(plan_of(sampler, keep), [r])[1] == pytest.approx(variance, abs=1e-12)


@pytest.mark.parametrize("sampler", POSITION_SAMPLERS)
def test_variance_from_second_order_inclusion(sampler):
    keep, second = 0.4, np.zeros((T, T))
    for prob, uniforms in position_outcomes(sampler, keep, [T]):
        positions, _ = sample_positions(sampler, T, keep, uniforms)
        second[np.ix_(positions, positions)] += prob
    first = inclusion_probs(sampler, T, keep)
    expected = LOG_RATIOS @ (second / np.outer(first, first) - 1) @ LOG_RATIOS
    assert moments(plan_of(sampler, keep), [LOG_RATIOS])[1] == pytest.approx(expected, abs=1e-12)


def test_separate_masks_for_policy_and_reference_cost_variance():
    """METHOD.md M8."""
    policy, reference = LOG_RATIOS - 3.0, np.full(T, -3.0)
    keep = 0.5
    separate = sum(moments(plan_of("bernoulli", keep), [v])[1] for v in (policy, reference))
    same = moments(plan_of("bernoulli", keep), [policy - reference])[1]
    assert same == pytest.approx((1 - keep) / keep * (LOG_RATIOS**2).sum(), abs=1e-12)
    assert separate == pytest.approx((1 - keep) / keep * ((policy**2).sum() + (reference**2).sum()), abs=1e-12)
    assert separate > 10 * same


@given(
    sampler=st.sampled_from(POSITION_SAMPLERS),
    length=st.integers(1, 200),
    keep=st.floats(1e-3, 1.0),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None)
def test_any_sample_is_sorted_and_inside(sampler, length, keep, seed):
    uniforms = np.random.default_rng(seed).random(num_uniforms(sampler, length, keep))
    positions, inclusion_prob = sample_positions(sampler, length, keep, uniforms)
    assert positions.dtype == np.int64
    assert (np.diff(positions) > 0).all()
    assert ((positions >= 0) & (positions < length)).all()
    assert ((inclusion_prob > 0) & (inclusion_prob <= 1)).all()
    if sampler == "systematic":
        assert abs(len(positions) - keep * length) < 1 + 1e-9
    elif sampler != "bernoulli":
        assert len(positions) == max(1, round(keep * length))


@given(length=st.integers(1, 300), keep=st.floats(1e-3, 1.0))
@settings(max_examples=100, deadline=None)
def test_stratified_blocks_are_even_and_as_near_to_the_rate_as_whole_numbers_allow(length, keep):
    edges = block_edges(length, keep)
    sizes = np.diff(edges)
    assert (edges[0], edges[-1]) == (0, length)
    assert sizes.min() >= 1
    assert sizes.max() - sizes.min() <= 1
    nearest = min(abs(n / length - keep) for n in range(1, length + 1))
    assert abs(inclusion_probs("stratified", length, keep).sum() / length - keep) <= nearest + 1e-12


@pytest.mark.parametrize("sampler", POSITION_SAMPLERS)
def test_rate_one_keeps_everything(sampler):
    uniforms = np.full(9, 1 - 2.0**-53)
    positions, inclusion_prob = sample_positions(sampler, 9, 1.0, uniforms)
    assert positions.tolist() == list(range(9))
    assert (inclusion_prob == 1.0).all()


@pytest.mark.parametrize("sampler", POSITION_SAMPLERS)
def test_greatest_uniform_below_one_is_safe(sampler):
    for keep in (1 - 2.0**-53, 0.5, 1 / 3):
        positions, _ = sample_positions(sampler, 7, keep, np.full(7, 1 - 2.0**-53))
        assert (np.diff(positions) > 0).all()
        assert (positions < 7).all()


@given(short=st.integers(1, 40), longer=st.integers(0, 40), keep=st.floats(0.01, 1.0), u=st.floats(0, 0.999))
@settings(max_examples=50, deadline=None)
def test_branches_with_one_start_score_the_same_positions(short, longer, keep, u):
    uniforms = np.array([u])
    first, _ = sample_positions("systematic", short, keep, uniforms)
    second, _ = sample_positions("systematic", short + longer, keep, uniforms)
    assert first.tolist() == second[second < short].tolist()


def test_a_sample_may_be_empty():
    positions, inclusion_prob = sample_positions("systematic", 3, 0.1, np.array([0.2]))
    assert len(positions) == len(inclusion_prob) == 0


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("grid", 3, 0.5, np.zeros(3)), "position_sampler is 'grid'"),
        (("fixed", 0, 0.5, np.zeros(3)), "length is 0"),
        (("fixed", 3, 0.0, np.zeros(3)), "position_keep is 0.0"),
        (("bernoulli", 3, 0.5, np.zeros(2)), "uniforms has 2 numbers"),
    ],
)
def test_wrong_arguments_are_named(arguments, match):
    with pytest.raises(ValueError, match=match):
        sample_positions(*arguments)
