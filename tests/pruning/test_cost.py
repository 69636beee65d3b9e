import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ds_stochdpo.pruning.cost import ModelShape, PairTokens, forward_flops, pair_cost

SHAPE = ModelShape(hidden=12, layers=2, ffn=20, heads=4, kv_heads=2, head_dim=3, vocab=30)
PAIR = PairTokens(prompt=6, chosen=5, rejected=4, chosen_scored=3, rejected_scored=2)


def counted_forward(shape, queries, keys, rows):
    """The same products counted by torch, one query at a time so that masked pairs are not run."""
    query_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    widths = [(query_width, 1), (kv_width, 2), (query_width, 1), (shape.ffn, shape.ffn_matrices)]
    with FlopCounterMode(display=False) as counter:
        for _ in range(shape.layers):
            for width, times in widths:
                for _ in range(times):
                    torch.ones(queries, shape.hidden) @ torch.ones(shape.hidden, width)
            for i in range(queries):
                seen = keys - queries + 1 + i
                scores = torch.ones(shape.heads, 1, shape.head_dim) @ torch.ones(shape.heads, shape.head_dim, seen)
                scores @ torch.ones(shape.heads, seen, shape.head_dim)
        torch.ones(rows, shape.hidden) @ torch.ones(shape.hidden, shape.vocab)
    return counter.get_total_flops()


@pytest.mark.parametrize(("queries", "keys", "rows"), [(5, 5, 0), (5, 11, 3), (1, 1, 1), (0, 4, 0)])
@pytest.mark.parametrize("ffn_matrices", [2, 3])
def test_forward_agrees_with_the_flop_counter(queries, keys, rows, ffn_matrices):
    shape = dataclasses.replace(SHAPE, ffn_matrices=ffn_matrices)
    ours = forward_flops(shape, query_tokens=queries, key_tokens=keys, scored_rows=rows)
    assert ours == counted_forward(shape, queries, keys, rows)


def test_equal_branches_cost_six_units_and_four_with_one_frozen():
    tokens = PairTokens(prompt=0, chosen=7, rejected=7, chosen_scored=7, rejected_scored=7)
    unit = forward_flops(SHAPE, query_tokens=7, key_tokens=7, scored_rows=7)
    assert pair_cost(SHAPE, tokens) == 6 * unit
    for kept in ("chosen", "rejected"):
        assert pair_cost(SHAPE, dataclasses.replace(tokens, kept=kept)) == 4 * unit


def test_a_split_context_costs_what_the_whole_does():
    whole = forward_flops(SHAPE, query_tokens=11, key_tokens=11, scored_rows=2)
    prompt = forward_flops(SHAPE, query_tokens=6, key_tokens=6, scored_rows=0)
    assert whole == prompt + forward_flops(SHAPE, query_tokens=5, key_tokens=11, scored_rows=2)


@pytest.mark.parametrize(("kept", "passes"), [("both", 3), ("chosen", 1), ("rejected", 1)])
def test_sharing_saves_one_prompt(kept, passes):
    """The second prompt would run live with both branches kept, frozen with one."""
    tokens = dataclasses.replace(PAIR, kept=kept)
    prompt = forward_flops(SHAPE, query_tokens=6, key_tokens=6, scored_rows=0)
    assert pair_cost(SHAPE, tokens, share_prompt=False) - pair_cost(SHAPE, tokens) == passes * prompt


def test_keeping_the_longer_branch_costs_more():
    costs = [pair_cost(SHAPE, dataclasses.replace(PAIR, kept=kept)) for kept in ("rejected", "chosen", "both")]
    assert costs == sorted(costs)
    assert len(set(costs)) == 3


def test_more_queries_than_keys_are_refused():
    with pytest.raises(ValueError, match="query_tokens is 3 of 2 key_tokens"):
        forward_flops(SHAPE, query_tokens=3, key_tokens=2, scored_rows=0)
