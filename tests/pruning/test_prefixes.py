import numpy as np
import pytest
from exact_outcomes import intervals, law_of, moments, weighted_sum
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_stochdpo.config import POSITION_SAMPLERS, PREFIX_SAMPLERS, PruningPlan
from ds_stochdpo.errors import ConfigError
from ds_stochdpo.pruning.prefixes import check_prefix_feasible, prefix_keep_range, prefix_law

CHOSEN = np.array([0.9, -0.4, 0.3, 0.7, -1.1, 0.2, 0.5])
REJECTED = np.array([-0.8, 0.6, 0.1, -0.9])
PLANS = [
    PruningPlan(prefix_sampler="two_point", prefix_keep=0.5, prefix_min_survival=0.25),
    PruningPlan(prefix_sampler="floor", prefix_keep=0.7, prefix_min_survival=0.3),
    PruningPlan(prefix_sampler="uniform", prefix_keep=0.6),
    PruningPlan(prefix_sampler="uniform", prefix_keep=0.5),
    PruningPlan(prefix_sampler="geometric", prefix_keep=0.4),
]
IDS = [f"{p.prefix_sampler}-{p.prefix_keep}" for p in PLANS]


def tails(values):
    return np.cumsum(values[::-1])[::-1]


def steps(law):
    """1 / S(k) - 1 / S(k - 1) with S(0) = 1."""
    inverse = 1.0 / law.survival_probs
    return np.diff(np.concatenate(([1.0], inverse)))


@pytest.mark.parametrize("plan", PLANS, ids=IDS)
def test_quantile_has_the_stated_survival(plan):
    law = law_of(plan, 7)
    reached = np.zeros(7)
    mean = 0.0
    for prob, u in intervals(law.survival_probs):
        prefix = law.quantile(u)
        assert 1 <= prefix <= 7
        reached[:prefix] += prob
        mean += prob * prefix
    np.testing.assert_allclose(reached, law.survival_probs, atol=1e-12)
    assert mean == pytest.approx(law.mean, abs=1e-12)
    least_uniform = plan.prefix_sampler == "uniform" and plan.prefix_keep == 0.5
    assert law.mean == pytest.approx(plan.prefix_keep * 7 + 0.5 * least_uniform)


def test_laws_worked_by_hand():
    two_point = prefix_law(8, keep=0.5, sampler="two_point", min_survival=0.2)  # a = 8 * 0.3 / 0.8 = 3
    assert two_point.survival_probs.tolist() == [1.0] * 3 + [0.2] * 5
    third = prefix_law(9, keep=0.5, sampler="two_point", min_survival=0.25)  # f = 1/3
    np.testing.assert_allclose(third.survival_probs, [1.0] * 3 + [0.25] * 6, atol=1e-15)
    mixed = prefix_law(4, keep=0.7, sampler="two_point", min_survival=0.5)  # a = 1.6: 1 or 2
    np.testing.assert_allclose(mixed.survival_probs, [1.0, 0.8, 0.5, 0.5], atol=1e-15)
    floor = prefix_law(4, keep=0.875, sampler="floor", min_survival=0.5)  # a = 2: K uniform on 2, 3, 4
    np.testing.assert_allclose(floor.survival_probs, [1.0, 1.0, 0.5 + 1 / 3, 0.5 + 1 / 6], atol=1e-15)
    uniform = prefix_law(4, keep=0.5, sampler="uniform", min_survival=0.25)
    np.testing.assert_allclose(uniform.survival_probs, [1.0, 0.75, 0.5, 0.25], atol=1e-15)
    assert uniform.mean / 4 == (4 + 1) / (2 * 4)
    geometric = prefix_law(3, keep=1.75 / 3, sampler="geometric", min_survival=0.25)
    np.testing.assert_allclose(geometric.survival_probs, [1.0, 0.5, 0.25], atol=1e-12)


@pytest.mark.parametrize("plan", PLANS, ids=IDS)
def test_estimate_is_unbiased_with_the_stated_variance(plan):
    """METHOD.md M10."""
    mean, variance = moments(plan, [CHOSEN])
    assert mean == pytest.approx(CHOSEN.sum(), abs=1e-12)
    assert variance == pytest.approx(float(steps(law_of(plan, 7)) @ tails(CHOSEN) ** 2), abs=1e-12)


@pytest.mark.parametrize("plan", PLANS, ids=IDS)
def test_covariance_of_coupled_branches(plan):
    """METHOD.md M11."""
    chosen_law, rejected_law = law_of(plan, len(CHOSEN)), law_of(plan, len(REJECTED))
    larger = np.maximum.outer(chosen_law.survival_probs, rejected_law.survival_probs)
    expected = CHOSEN @ (1 / larger - 1) @ REJECTED
    mean, variance = moments(
        plan,
        [CHOSEN, REJECTED],
        lambda draws: weighted_sum(draws[0], CHOSEN) - weighted_sum(draws[1], REJECTED),
    )
    alone = sum(moments(plan, [v])[1] for v in (CHOSEN, REJECTED))
    assert mean == pytest.approx(CHOSEN.sum() - REJECTED.sum(), abs=1e-12)
    assert (alone - variance) / 2 == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("plan", PLANS, ids=IDS)
@pytest.mark.parametrize("sampler", POSITION_SAMPLERS)
def test_prefixes_and_positions_together_are_unbiased(plan, sampler):
    """METHOD.md M12."""
    keep, values = 0.4, CHOSEN[:5]
    both = PruningPlan(keep, sampler, plan.prefix_keep, plan.prefix_sampler, plan.prefix_min_survival)
    mean, variance = moments(both, [values])
    assert mean == pytest.approx(values.sum(), abs=1e-12)
    if sampler == "bernoulli":
        law = law_of(plan, 5)
        expected = (1 - keep) / keep * (values**2 / law.survival_probs).sum() + steps(law) @ tails(values) ** 2
        assert variance == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("plan", PLANS, ids=IDS)
def test_unweighted_prefixes_estimate_another_objective(plan):
    unweighted = PruningPlan(
        prefix_keep=plan.prefix_keep,
        prefix_sampler=plan.prefix_sampler,
        prefix_min_survival=plan.prefix_min_survival,
        prefix_weighting="none",
    )
    mean, _ = moments(unweighted, [CHOSEN])
    assert mean == pytest.approx(float(law_of(plan, 7).survival_probs @ CHOSEN), abs=1e-12)
    assert abs(mean - CHOSEN.sum()) > 1e-3


@given(
    sampler=st.sampled_from(PREFIX_SAMPLERS),
    length=st.integers(1, 300),
    rho=st.floats(0.01, 1.0),
    share=st.floats(0.0, 1.0),
    u=st.floats(0.0, 1.0, exclude_max=True),
)
@settings(max_examples=200, deadline=None)
def test_any_feasible_law_is_a_law_with_the_asked_mean(sampler, length, rho, share, u):
    low, high = prefix_keep_range(sampler, rho)
    keep = min(1.0, low + share * (high - low))
    law = prefix_law(length, keep=keep, sampler=sampler, min_survival=rho)
    assert law.survival_probs[0] == 1.0
    assert (np.diff(law.survival_probs) <= 1e-15).all()
    assert law.survival_probs[-1] > 4e-4
    if sampler in ("two_point", "floor"):
        assert law.survival_probs[-1] >= rho - 1e-15
    assert -1e-6 <= law.mean - keep * length < 1.0
    assert law.survival_probs[law.quantile(u) - 1] > u


@given(sampler=st.sampled_from(["two_point", "floor", "uniform"]), length=st.integers(20, 99))
@settings(max_examples=30, deadline=None)
def test_mean_is_exact_away_from_the_lower_end(sampler, length):
    assert prefix_law(length, keep=0.8, sampler=sampler, min_survival=0.3).mean == pytest.approx(0.8 * length)


@pytest.mark.parametrize("sampler", PREFIX_SAMPLERS)
def test_keep_one_runs_everything(sampler):
    law = prefix_law(5, keep=1.0, sampler=sampler, min_survival=1.0)
    assert law.survival_probs.tolist() == [1.0] * 5
    assert law.quantile(1 - 2.0**-53) == 5
    assert law.survival(5) == 1.0


def test_geometric_stays_reachable_on_short_responses():
    law = prefix_law(2, keep=0.5, sampler="geometric", min_survival=0.25)
    assert law.survival(2) == pytest.approx(0.2032 / 2, abs=1e-4)


@pytest.mark.parametrize(
    ("sampler", "keep", "rho", "match"),
    [
        ("two_point", 0.2, 0.25, r"prefix_keep is 0.2, .*two_point.*0.25 reaches only \[0.25, 1\]"),
        ("floor", 0.6, 0.25, r"prefix_keep is 0.6, .*floor.*0.25 reaches only \[0.625, 1\]"),
        ("uniform", 0.4, 0.25, r"prefix_keep is 0.4, .*uniform reaches only \[0.5, 1\]"),
        ("geometric", 0.1, 0.25, r"prefix_keep is 0.1, .*geometric reaches only \[0.1446, 1\]"),
        ("two_point", 0.9, 1.0, r"reaches only \[1, 1\]; raise prefix_keep or lower prefix_min_survival"),
    ],
)
def test_infeasible_rates_name_the_range(sampler, keep, rho, match):
    plan = PruningPlan(prefix_sampler=sampler, prefix_keep=keep, prefix_min_survival=rho)
    with pytest.raises(ConfigError, match=match):
        check_prefix_feasible(plan)
    with pytest.raises(ConfigError, match=match):
        prefix_law(10, keep=keep, sampler=sampler, min_survival=rho)


def test_rates_at_the_lower_end_are_feasible():
    for sampler in PREFIX_SAMPLERS:
        for rho in (0.1, 0.3, 0.55):
            low, _ = prefix_keep_range(sampler, rho)
            check_prefix_feasible(PruningPlan(prefix_sampler=sampler, prefix_keep=low, prefix_min_survival=rho))


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="length is 0"):
        prefix_law(0, keep=0.5, sampler="two_point", min_survival=0.25)
    with pytest.raises(ConfigError, match="prefix_sampler is 'zipf'"):
        prefix_law(3, keep=0.5, sampler="zipf", min_survival=0.25)
    with pytest.raises(ConfigError, match=r"prefix_min_survival is 0\.0"):
        prefix_law(3, keep=0.5, sampler="two_point", min_survival=0.0)
    with pytest.raises(ValueError, match="t is 4"):
        prefix_law(3, keep=0.5, sampler="two_point", min_survival=0.25).survival(4)
