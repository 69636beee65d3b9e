import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ds_stochdpo.pruning.cost import ModelShape, PairTokens, Run, attention_flops, head_flops, linear_flops, pair_cost

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
def test_parts_agree_with_the_flop_counter(queries, keys, rows, ffn_matrices):
    shape = dataclasses.replace(SHAPE, ffn_matrices=ffn_matrices)
    assert forward(shape, queries, keys, rows) == counted_forward(shape, queries, keys, rows)


def forward(shape, queries, keys, rows):
    attention = attention_flops(shape, Run(queries, keys), "causal")
    return linear_flops(shape, queries) + attention + head_flops(shape, rows)


def test_equal_branches_cost_six_units_and_four_with_one_frozen():
    """Apart from attention, whose backward pass is 2.5 forward passes."""
    shape = dataclasses.replace(SHAPE, hidden=10**6)
    tokens = PairTokens(prompt=0, chosen=7, rejected=7, chosen_scored=7, rejected_scored=7)
    unit = forward(shape, 7, 7, 7)
    assert pair_cost(shape, tokens) == pytest.approx(6 * unit, rel=1e-5)
    for kept in ("chosen", "rejected"):
        assert pair_cost(shape, dataclasses.replace(tokens, kept=kept)) == pytest.approx(4 * unit, rel=1e-5)
    attention = attention_flops(SHAPE, Run(7, 7), "causal")
    assert pair_cost(SHAPE, tokens) == 6 * forward(SHAPE, 7, 7, 7) + attention


def test_a_rectangle_counts_every_query_with_every_key():
    assert attention_flops(SHAPE, Run(5, 11), "rectangle") == 2 * 4 * 12 * 55
    assert attention_flops(SHAPE, Run(5, 11), "causal") == 2 * 4 * 12 * (55 - 10)


def test_a_split_context_costs_what_the_whole_does():
    assert forward(SHAPE, 11, 11, 2) == forward(SHAPE, 6, 6, 0) + forward(SHAPE, 5, 11, 2)


@pytest.mark.parametrize(("kept", "passes"), [("both", 3), ("chosen", 1), ("rejected", 1)])
def test_sharing_saves_one_prompt(kept, passes):
    """The second prompt would run live with both branches kept, frozen with one."""
    tokens = dataclasses.replace(PAIR, kept=kept)
    saved = pair_cost(SHAPE, tokens, share_prompt=False) - pair_cost(SHAPE, tokens)
    attention = attention_flops(SHAPE, Run(6, 6), "causal")
    assert saved == passes * linear_flops(SHAPE, 6) + (3.5 if passes == 3 else 1) * attention


def test_keeping_the_longer_branch_costs_more():
    costs = [pair_cost(SHAPE, dataclasses.replace(PAIR, kept=kept)) for kept in ("rejected", "chosen", "both")]
    assert costs == sorted(costs)
    assert len(set(costs)) == 3


def test_a_shared_start_meets_the_head_once_without_gradient():
    more = dataclasses.replace(PAIR, shared_scored=3)
    assert pair_cost(SHAPE, more) - pair_cost(SHAPE, PAIR) == head_flops(SHAPE, 3)


def test_more_queries_than_keys_are_refused():
    with pytest.raises(ValueError, match="3 queries and 2 keys"):
        attention_flops(SHAPE, Run(3, 2), "causal")
