"""From drawn pairs to packed lanes, and from an optimizer step to balanced micro-batches."""

from ds_stochdpo.packing.lanes import SLOTS, Lane, LaneLayout, ScoreRows, TokenCounts, pack_lanes
from ds_stochdpo.packing.plan import (
    BatchLimits,
    assign_to_ranks,
    check_draws,
    cut_micro_batches,
    draw,
    draw_lengths,
    lane_tokens,
    pair_lengths,
    pair_tokens,
)
from ds_stochdpo.packing.segments import AttentionSegments, cu_seqlens

__all__ = [
    "SLOTS",
    "AttentionSegments",
    "BatchLimits",
    "Lane",
    "LaneLayout",
    "ScoreRows",
    "TokenCounts",
    "assign_to_ranks",
    "check_draws",
    "cu_seqlens",
    "cut_micro_batches",
    "draw",
    "draw_lengths",
    "lane_tokens",
    "pack_lanes",
    "pair_lengths",
    "pair_tokens",
]
