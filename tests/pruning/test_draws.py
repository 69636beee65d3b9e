import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_stochdpo.config import POSITION_SAMPLERS, PruningPlan
from ds_stochdpo.errors import ConfigError
from ds_stochdpo.pruning import draw_pairs, full_draw
from ds_stochdpo.pruning.positions import inclusion_probs
from ds_stochdpo.pruning.prefixes import prefix_law

PLAN = PruningPlan(0.5, "bernoulli", 0.6, "two_point", 0.25, "ipw", "single", 0.5, "iid")
IDS = [7, 0, 123456, 8]
CHOSEN = [9, 14, 20, 5]
REJECTED = [11, 3, 20, 5]


def draw(plan=PLAN, ids=IDS, chosen=CHOSEN, rejected=REJECTED, *, seed=0, epoch=0, step=0):
    pairs = {"pair_ids": ids, "chosen_lengths": chosen, "rejected_lengths": rejected}
    return draw_pairs(plan, seed=seed, epoch=epoch, step=step, **pairs)


def plain(pair):
    """A draw as comparable values."""
    sides = [(b.prefix_tokens, b.positions.tolist(), b.weights.tolist()) for b in (pair.chosen, pair.rejected)]
    return (*sides, pair.kept, pair.kept_prob)


def responses(pair):
    return plain(pair)[:2]


@pytest.mark.parametrize("sampler", POSITION_SAMPLERS)
def test_draw_of_a_pair_ignores_order_other_pairs_and_step(sampler):
    plan = dataclasses.replace(PLAN, position_sampler=sampler)
    together = [plain(pair) for pair in draw(plan)]
    backwards = [plain(pair) for pair in draw(plan, IDS[::-1], CHOSEN[::-1], REJECTED[::-1], step=5)]
    alone = [plain(draw(plan, [i], [c], [r])[0]) for i, c, r in zip(IDS, CHOSEN, REJECTED, strict=True)]
    assert together == backwards[::-1] == alone


def test_balanced_branch_leaves_positions_and_prefixes_alone():
    balanced = draw(dataclasses.replace(PLAN, branch_balance="balanced"))
    assert [responses(pair) for pair in balanced] == [responses(pair) for pair in draw()]
    assert sum(pair.kept == "chosen" for pair in balanced) == 2


@pytest.mark.parametrize("key", ["seed", "epoch"])
def test_draws_change_with_seed_and_epoch(key):
    plan = dataclasses.replace(PLAN, prefix_keep=1.0)
    long = (list(range(8)), [60] * 8, [50] * 8)
    drawn = [[responses(pair) for pair in draw(plan, *long, **{key: value})] for value in range(2)]
    assert all(a != b for a, b in zip(*drawn, strict=True))
    prefixes = PruningPlan(prefix_keep=0.6, prefix_sampler="uniform")
    first, second = ([p.chosen.prefix_tokens for p in draw(prefixes, *long, **{key: v})] for v in range(2))
    assert first != second


def test_identical_rows_have_draws_of_their_own():
    plan = dataclasses.replace(PLAN, prefix_keep=1.0)
    drawn = draw(plan, list(range(8)), [30] * 8, [30] * 8)
    assert len({str(responses(pair)) for pair in drawn}) == 8
    assert {pair.kept for pair in drawn} == {"chosen", "rejected"}


@pytest.mark.parametrize("sampler", POSITION_SAMPLERS)
def test_equal_lengths_give_both_branches_the_same_positions(sampler):
    plan = dataclasses.replace(PLAN, position_sampler=sampler)
    for pair in draw(plan, list(range(10)), [17] * 10, [17] * 10):
        assert responses(pair)[0] == responses(pair)[1]


@given(
    sampler=st.sampled_from(POSITION_SAMPLERS),
    weighting=st.sampled_from(["ipw", "none"]),
    lengths=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    pair_id=st.integers(0, 2**40),
)
@settings(max_examples=100, deadline=None)
def test_weights_are_the_inverse_probabilities_inside_the_prefix(sampler, weighting, lengths, pair_id):
    plan = dataclasses.replace(PLAN, position_sampler=sampler, prefix_weighting=weighting)
    pair = draw(plan, [pair_id], [lengths[0]], [lengths[1]])[0]
    for branch, length in zip((pair.chosen, pair.rejected), lengths, strict=True):
        survival = prefix_law(length, keep=0.6, sampler="two_point", min_survival=0.25).survival_probs
        prob = inclusion_probs(sampler, length, 0.5) * (survival if weighting == "ipw" else 1.0)
        assert branch.positions.dtype == np.int64
        assert branch.weights.dtype == np.float64
        assert 1 <= branch.prefix_tokens <= length
        assert (branch.positions < branch.prefix_tokens).all()
        np.testing.assert_allclose(branch.weights, 1.0 / prob[branch.positions], rtol=1e-15)


def test_kept_probability_is_that_of_the_kept_branch():
    plan = dataclasses.replace(PLAN, branch_prob=0.2)
    drawn = draw(plan, list(range(60)), [5] * 60, [5] * 60)
    assert {(pair.kept, pair.kept_prob) for pair in drawn} == {("chosen", 0.2), ("rejected", 0.8)}


def test_both_branches_are_kept_for_certain():
    assert {(p.kept, p.kept_prob) for p in draw(dataclasses.replace(PLAN, branch="both"))} == {("both", 1.0)}


def test_nothing_pruned_is_the_full_draw():
    for pair, chosen, rejected in zip(draw(PruningPlan()), CHOSEN, REJECTED, strict=True):
        assert plain(pair) == plain(full_draw(chosen, rejected))
        assert pair.chosen.prefix_tokens == chosen
        assert pair.rejected.weights.tolist() == [1.0] * rejected


def test_a_sample_may_be_empty_and_a_step_too():
    plan = PruningPlan(position_keep=0.01)
    pair = draw(plan, [0], [3], [3])[0]
    assert len(pair.chosen.positions) == len(pair.chosen.weights) == 0
    assert draw(PLAN, [], [], []) == []


def test_numpy_ids_and_lengths_draw_the_same():
    arrays = draw(PLAN, *(np.array(values) for values in (IDS, CHOSEN, REJECTED)))
    assert [plain(pair) for pair in arrays] == [plain(pair) for pair in draw()]


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="have 4, 3 and 4 items"):
        draw(chosen=CHOSEN[:3])
    with pytest.raises(ValueError, match="length is 0"):
        draw(chosen=[9, 14, 20, 0])
    with pytest.raises(ConfigError, match=r"prefix_keep is 0.6, .*\[0.625, 1\]"):
        draw(dataclasses.replace(PLAN, prefix_sampler="floor"))
