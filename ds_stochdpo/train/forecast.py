"""What a plan will run, from the draws of a few optimizer steps: tokens, work and the largest micro-batch.

Nothing is estimated here that can be drawn: the draws, shares and micro-batches are those the engine would make.
Entry: `forecast`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.data import PreferencePair, epoch_order, step_batches
from ds_stochdpo.packing import BatchLimits, assign_to_ranks, cut_micro_batches, draw, lane_tokens, pair_tokens
from ds_stochdpo.pruning import ModelShape, PairDraw, PairTokens, pair_cost

MOST_STEPS = 16
"""Optimizer steps that are drawn at most."""


@dataclass(frozen=True)
class Forecast:
    """Means over the pairs of the drawn steps, and the largest micro-batch of any rank.

    Attributes:
        num_pairs: Pairs that were drawn.
        executed: Tokens run a pair, a shared prompt once.
        backward: Tokens run with gradient a pair.
        scored: Positions that meet the head a pair.
        flops: Work a pair, without activation checkpointing.
        stock_tokens: Tokens that stock DPO without padding runs a pair, all of them with gradient.
        stock_scored: Positions that stock DPO scores a pair.
        stock_flops: Work of stock DPO a pair.
        micro_batches: Most micro-batches of a rank in one optimizer step.
        live_tokens: Tokens with gradient of the largest micro-batch.
        frozen_tokens: Tokens without gradient of that one.
        live_rows: Most rows with gradient that meet the head in one micro-batch.
    """

    num_pairs: int
    executed: float
    backward: float
    scored: float
    flops: float
    stock_tokens: float
    stock_scored: float
    stock_flops: float
    micro_batches: int
    live_tokens: int
    frozen_tokens: int
    live_rows: int


def assumed_pairs(config: StochDPOConfig, max_length: int, count: int) -> list[PreferencePair]:
    """Pairs that fill `max_length`: the longest prompt allowed, or half of it, and two responses of the rest."""
    prompt = min(config.max_prompt_length or max_length // 2, max_length - 1)
    response = max_length - prompt
    ids = np.zeros(prompt, dtype=np.int64)
    # The responses differ from their first token on, so none of them counts as shared.
    chosen, rejected = np.zeros(response, dtype=np.int64), np.ones(response, dtype=np.int64)
    return [PreferencePair(i, ids, chosen, rejected, "assumed") for i in range(count)]


def forecast(
    pairs: Sequence[PreferencePair], config: StochDPOConfig, shape: ModelShape, *, world_size: int
) -> Forecast:
    """Draw the first optimizer steps of a run and count what they hold.

    Args:
        pairs: Training pairs, at least one.
        config: Settings with batch sizes resolved.
        shape: The model.
        world_size: Ranks.

    Returns:
        The counts.
    """
    assert config.per_device_train_batch_size is not None
    assert config.gradient_accumulation_steps is not None
    pairs_per_step = world_size * config.per_device_train_batch_size * config.gradient_accumulation_steps
    windows = step_batches(epoch_order(len(pairs), config.seed, 0), pairs_per_step)[:MOST_STEPS]
    tokens: list[PairTokens] = []
    stock: list[PairTokens] = []
    lanes: list[tuple[int, int]] = []
    num_micro, largest = 0, [0, 0, 0]
    for step, window in enumerate(windows):
        chosen = [pairs[i] for i in window]
        draws = draw(chosen, config, epoch=0, step=step)
        step_tokens, step_lanes = _count(chosen, draws, config)
        tokens += step_tokens
        lanes += step_lanes
        stock += [_stock(p) for p in chosen]
        costs = [pair_cost(shape, t, share_prompt=config.share_prompt) for t in step_tokens]
        for share in assign_to_ranks(costs, world_size):
            limits = BatchLimits(config.per_device_train_batch_size, config.max_tokens_per_micro_batch)
            cut = cut_micro_batches([sum(step_lanes[i]) for i in share], limits)
            num_micro = max(num_micro, len(cut))
            for micro in cut:
                largest = max(largest, _size([share[i] for i in micro], step_tokens, step_lanes))
    count = len(tokens)
    return Forecast(
        num_pairs=count,
        executed=sum(live + frozen for live, frozen in lanes) / count,
        backward=sum(live for live, _ in lanes) / count,
        scored=sum(t.chosen_scored + t.rejected_scored for t in tokens) / count,
        flops=sum(pair_cost(shape, t, share_prompt=config.share_prompt) for t in tokens) / count,
        stock_tokens=sum(2 * t.prompt + t.chosen + t.rejected for t in stock) / count,
        stock_scored=sum(t.chosen_scored + t.rejected_scored for t in stock) / count,
        stock_flops=sum(pair_cost(shape, t, share_prompt=False) for t in stock) / count,
        micro_batches=num_micro,
        live_tokens=largest[0],
        frozen_tokens=largest[1],
        live_rows=largest[2],
    )


def _count(
    pairs: Sequence[PreferencePair], draws: Sequence[PairDraw], config: StochDPOConfig
) -> tuple[list[PairTokens], list[tuple[int, int]]]:
    """Tokens of each drawn pair, and its (live, frozen) tokens."""
    tokens, lanes = [], []
    for pair, drawn in zip(pairs, draws, strict=True):
        tokens.append(pair_tokens(pair, drawn, share_response_start=config.share_response_start))
        own = lane_tokens(
            pair, drawn, share_prompt=config.share_prompt, share_response_start=config.share_response_start
        )
        lanes.append((own.live, own.frozen))
    return tokens, lanes


def _stock(pair: PreferencePair) -> PairTokens:
    return PairTokens(
        prompt=len(pair.prompt_ids),
        chosen=len(pair.chosen_ids),
        rejected=len(pair.rejected_ids),
        chosen_scored=len(pair.chosen_ids),
        rejected_scored=len(pair.rejected_ids),
    )


def _size(micro: Sequence[int], tokens: Sequence[PairTokens], lanes: Sequence[tuple[int, int]]) -> list[int]:
    """(live tokens, frozen tokens, live rows) of one micro-batch."""
    rows = sum(
        (tokens[i].chosen_scored if tokens[i].kept != "rejected" else 0)
        + (tokens[i].rejected_scored if tokens[i].kept != "chosen" else 0)
        for i in micro
    )
    return [sum(lanes[i][0] for i in micro), sum(lanes[i][1] for i in micro), rows]
