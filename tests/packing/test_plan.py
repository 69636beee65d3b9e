"""How pairs are spread over ranks and cut into micro-batches."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_stochdpo.packing import BatchLimits, assign_to_ranks, cut_micro_batches, lane_tokens
from ds_stochdpo.pruning.draws import PairDraw, full_draw
from tests.packing.strategies import pair_of

costs_of_pairs = st.lists(st.integers(1, 1000), max_size=40)


def loads(costs, shares):
    return [sum(costs[i] for i in share) for share in shares]


@given(costs_of_pairs, st.integers(1, 9))
def test_every_pair_has_one_rank_and_counts_differ_by_at_most_one(costs, world_size):
    shares = assign_to_ranks(costs, world_size)
    assert len(shares) == world_size
    assert sorted(itertools.chain(*shares)) == list(range(len(costs)))
    counts = [len(s) for s in shares]
    assert max(counts) - min(counts) <= 1
    assert all(s == sorted(s) for s in shares)
    assert shares == assign_to_ranks(list(costs), world_size)


@given(costs_of_pairs, st.integers(1, 9))
def test_loads_are_balanced(costs, world_size):
    shares = assign_to_ranks(costs, world_size)
    # Equal counts bound the gap: longest first never leaves two ranks further apart than the dearest pair.
    if costs:
        gap = max(loads(costs, shares)) - min(loads(costs, shares))
        assert gap <= max(costs)


def best_split(costs, world_size):
    """Least possible load of the dearest rank, by trying every assignment with counts within 1."""
    least = sum(costs)
    for ranks in itertools.product(range(world_size), repeat=len(costs)):
        shares = [[i for i, r in enumerate(ranks) if r == rank] for rank in range(world_size)]
        counts = [len(s) for s in shares]
        if max(counts) - min(counts) <= 1:
            least = min(least, max(loads(costs, shares)))
    return least


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(2, 3))
def test_dearest_rank_is_near_the_best_possible(costs, world_size):
    assert max(loads(costs, assign_to_ranks(costs, world_size))) <= 4 / 3 * best_split(costs, world_size)


def test_long_pairs_go_to_different_ranks():
    costs = [90, 80, 10, 20]
    assert loads(costs, assign_to_ranks(costs, 2)) == [100, 100]
    # In file order one rank would run 170.
    assert assign_to_ranks(costs, 2) == [[0, 2], [1, 3]]


def test_a_rank_may_get_nothing():
    assert assign_to_ranks([7], 3) == [[0], [], []]
    assert assign_to_ranks([], 2) == [[], []]


@given(costs_of_pairs, st.integers(1, 8), st.none() | st.integers(1, 1500))
def test_micro_batches_hold_every_pair_once_and_keep_the_limits(tokens, max_pairs, max_tokens):
    limits = BatchLimits(max_pairs, max_tokens)
    cuts = cut_micro_batches(tokens, limits)
    assert sorted(itertools.chain(*cuts)) == list(range(len(tokens)))
    for cut in cuts:
        assert cut
        assert cut == sorted(cut)
        assert len(cut) <= max_pairs
        if max_tokens is not None and len(cut) > 1:
            assert sum(tokens[i] for i in cut) <= max_tokens
    assert cuts == cut_micro_batches(list(tokens), limits)


@given(costs_of_pairs, st.integers(1, 8))
def test_without_a_token_limit_the_number_of_micro_batches_depends_on_the_count_alone(tokens, max_pairs):
    assert len(cut_micro_batches(tokens, BatchLimits(max_pairs))) == -(-len(tokens) // max_pairs)


@given(costs_of_pairs, st.integers(1, 8), st.integers(1, 1500))
def test_no_two_neighbours_could_be_merged(tokens, max_pairs, max_tokens):
    cuts = cut_micro_batches(tokens, BatchLimits(max_pairs, max_tokens))
    for a, b in itertools.combinations(cuts, 2):
        both = [*a, *b]
        assert len(both) > max_pairs or sum(tokens[i] for i in both) > max_tokens


def test_a_pair_above_the_limit_runs_alone():
    assert cut_micro_batches([500, 10, 20, 600], BatchLimits(8, 100)) == [[3], [0], [1, 2]]


@pytest.mark.parametrize("max_tokens", [None, 100])
def test_no_pairs_give_no_micro_batches(max_tokens):
    assert cut_micro_batches([], BatchLimits(4, max_tokens)) == []


def test_lane_tokens_of_an_example():
    pair = pair_of(0, 10, 7, 4, shared=2)
    full = full_draw(7, 4)
    kept = PairDraw(full.chosen, full.rejected, "chosen", 0.5)
    # Own inputs: chosen 7 - 2 - 1, rejected 4 - 2 - 1; the common part is 10 + 2.
    both, single = lane_tokens(pair, full), lane_tokens(pair, kept)
    assert (both.live, both.frozen, both.total) == (17, 0, 17)
    assert (single.live, single.frozen, single.total) == (16, 1, 17)
    apart = lane_tokens(pair, kept, share_prompt=False)
    assert (apart.live, apart.frozen) == (16, 13)
    whole = lane_tokens(pair, full, share_response_start=False)
    assert (whole.live, whole.frozen) == (10 + 6 + 3, 0)
