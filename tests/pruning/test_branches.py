import itertools

import numpy as np
import pytest
from exact_outcomes import intervals
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_stochdpo.config import PruningPlan
from ds_stochdpo.pruning.branches import (
    antithetic_couples,
    chosen_keep_probs,
    draw_branches,
    length_order,
    madow_sample,
)

UNEQUAL = np.array([0.3, 0.62, 0.11, 0.5, 0.97])
STEPS = st.lists(
    st.tuples(st.integers(0, 10**6), st.integers(1, 50), st.integers(1, 50)),
    min_size=1,
    max_size=12,
    unique_by=lambda pair: pair[0],
)


def draw(pairs, plan, *, seed=0, epoch=0, step=0):
    ids, chosen, rejected = (list(column) for column in zip(*pairs, strict=True))
    kept, prob = draw_branches(
        plan,
        seed=seed,
        epoch=epoch,
        step=step,
        pair_ids=ids,
        chosen_lengths=chosen,
        rejected_lengths=rejected,
    )
    return dict(zip(ids, zip(kept.tolist(), prob.tolist(), strict=True), strict=True))


def plan_of(prob, balance):
    return PruningPlan(branch="single", branch_prob=prob, branch_balance=balance)


@pytest.mark.parametrize("num_pairs", [1, 2, 5, 6])
def test_couples_keep_half_with_marginals_of_one_half(num_pairs):
    """METHOD.md M17, by all outcomes of the coins."""
    outcomes = [
        antithetic_couples(num_pairs, np.array(coins))
        for coins in itertools.product([0.25, 0.75], repeat=(num_pairs + 1) // 2)
    ]
    assert np.mean(outcomes, axis=0).tolist() == [0.5] * num_pairs
    for kept in outcomes:
        assert abs(kept.sum() - num_pairs / 2) <= 0.5
        assert all(a != b for a, b in zip(kept[0::2], kept[1::2], strict=False))
    assert len({tuple(kept) for kept in outcomes}) == len(outcomes)


def test_one_coin_for_all_is_not_balanced():
    """The shared draw has the right marginals too, so the test above must look at counts."""
    outcomes = [np.full(6, coin < 0.5) for coin in (0.25, 0.75)]
    assert np.mean(outcomes, axis=0).tolist() == [0.5] * 6
    assert all(abs(kept.sum() - 3) > 1 for kept in outcomes)


def test_madow_marginals_and_counts_are_exact():
    """METHOD.md M18, by integrating over the start."""
    marginals = np.zeros(5)
    for prob, start in intervals(np.ceil(np.cumsum(UNEQUAL)) - np.cumsum(UNEQUAL)):
        kept = madow_sample(UNEQUAL, start)
        marginals += prob * kept
        assert abs(kept.sum() - UNEQUAL.sum()) < 1
    np.testing.assert_allclose(marginals, UNEQUAL, atol=1e-12)


@given(
    probs=st.lists(st.floats(0.01, 0.99), min_size=1, max_size=20),
    start=st.floats(0.0, 1.0, exclude_max=True),
    cut=st.tuples(st.integers(0, 20), st.integers(0, 20)),
)
@settings(max_examples=100, deadline=None)
def test_madow_balances_every_run_of_neighbours(probs, start, cut):
    kept = madow_sample(np.array(probs), start)
    low, high = sorted(cut)
    assert abs(kept[low:high].sum() - sum(probs[low:high])) <= 1 + 1e-9


@given(pairs=STEPS, prob=st.sampled_from([0.5, 0.3, "sqrt_length"]), seed=st.integers(0, 99), data=st.data())
@settings(max_examples=100, deadline=None)
def test_balanced_draw_keeps_the_expected_count_in_any_order(pairs, prob, seed, data):
    plan = plan_of(prob, "balanced")
    drawn = draw(pairs, plan, seed=seed, step=3)
    assert drawn == draw(data.draw(st.permutations(pairs)), plan, seed=seed, step=3)
    assert abs(sum(kept for kept, _ in drawn.values()) - sum(p for _, p in drawn.values())) < 1


@given(pairs=STEPS, prob=st.sampled_from([0.5, 0.3, "sqrt_length"]), seed=st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_iid_draw_of_a_pair_ignores_the_others(pairs, prob, seed):
    plan = plan_of(prob, "iid")
    together = draw(pairs, plan, seed=seed, step=3)
    alone = [draw([pair], plan, seed=seed, step=8) for pair in pairs]
    assert together == {pair_id: kept for one in alone for pair_id, kept in one.items()}


@pytest.mark.parametrize("prob", [0.5, 0.2, "sqrt_length"])
@pytest.mark.parametrize("balance", ["balanced", "iid"])
def test_frequencies_over_steps_match_the_probabilities(prob, balance):
    """2000 draws of six pairs, frequencies within four standard deviations; the seed is fixed."""
    pairs = [(10 + i, 4 + 3 * i, 9 - i) for i in range(6)]
    kept = np.zeros(6)
    for i in range(2000):
        drawn = draw(pairs, plan_of(prob, balance), epoch=i, step=i)
        kept += [drawn[pair_id][0] for pair_id, _, _ in pairs]
    probs = np.array([drawn[pair_id][1] for pair_id, _, _ in pairs])
    assert (np.abs(kept / 2000 - probs) < 4 * np.sqrt(probs * (1 - probs) / 2000)).all()


def test_balanced_draws_change_with_seed_epoch_and_step():
    pairs = [(i, 5 + i, 5) for i in range(40)]
    plan = plan_of(0.5, "balanced")
    drawn = [
        str(draw(pairs, plan, seed=seed, epoch=epoch, step=step))
        for seed in (0, 1)
        for epoch in (0, 1)
        for step in (0, 1)
    ]
    assert len(set(drawn)) == 8


def test_couples_are_neighbours_in_length():
    pairs = [(0, 30, 30), (1, 2, 2), (2, 31, 30), (3, 2, 3)]
    drawn = draw(pairs, plan_of(0.5, "balanced"))
    assert drawn[0][0] != drawn[2][0]
    assert drawn[1][0] != drawn[3][0]


def test_order_is_by_length_then_id():
    assert length_order([9, 4, 7], [3, 5, 1], [4, 2, 1]).tolist() == [2, 1, 0]


def test_probability_of_chosen_follows_the_root_of_its_length():
    assert chosen_keep_probs("sqrt_length", [4, 16], [4, 4]).tolist() == pytest.approx([0.5, 2 / 3], abs=1e-15)
    assert chosen_keep_probs(0.2, [4, 16], [4, 4]).tolist() == [0.2, 0.2]
