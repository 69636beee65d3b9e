"""What a plan will run, from the draws of a few optimizer steps: tokens, work and the largest micro-batch.

Nothing is estimated here that can be drawn: the draws, shares and micro-batches are those the engine would make.
Entry: `forecast`, `variant_of`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.data import PreferencePair, epoch_order, step_batches
from ds_stochdpo.packing import (
    BatchLimits,
    assign_to_ranks,
    cut_micro_batches,
    draw,
    lane_tokens,
    pair_lengths,
    pair_tokens,
)
from ds_stochdpo.pruning import AttentionCount, ModelShape, PairDraw, StepWork, Variant, pair_cost, step_work

MOST_STEPS = 16
"""Optimizer steps that are drawn at most."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Pairs of one micro-batch of one rank, and what was drawn for them."""

    pairs: tuple[PreferencePair, ...]
    draws: tuple[PairDraw, ...]
    work: StepWork


@dataclass(frozen=True, eq=False)
class Forecast:
    """Means over the pairs of the drawn steps, and the largest micro-batch of any rank.

    Attributes:
        num_pairs: Pairs that were drawn.
        work: Operations and tokens a pair.
        imbalance: Work of the busiest rank over the mean of the ranks, as a mean over steps.
        micro_batches: Most micro-batches of a rank in one optimizer step.
        largest: The micro-batch with the most tokens that are back-propagated.
    """

    num_pairs: int
    work: StepWork
    imbalance: float
    micro_batches: int
    largest: MicroBatch


def variant_of(config: StochDPOConfig, name: str = "") -> Variant:
    """How a run with these settings executes a batch."""
    return Variant(
        name,
        "shared" if config.share_prompt else "packed",
        plan=config.pruning,
        gradient_checkpointing=config.gradient_checkpointing,
        score_recompute=config.score_recompute,
        mlp_tiles=config.mlp_tile_tokens is not None,
        reference=config.reference,
        share_response_start=config.share_response_start,
    )


def stock_of(config: StochDPOConfig) -> Variant:
    """How stock DPO executes a batch of such a run: padded, concatenated, with logits of every row."""
    return Variant(
        "stock", "padded", "full", gradient_checkpointing=config.gradient_checkpointing, reference=config.reference
    )


def settings_for(config: StochDPOConfig, variant: Variant) -> StochDPOConfig:
    """Settings of the run whose batches are executed as a variant that is not padded."""
    return dataclasses.replace(
        config,
        **dataclasses.asdict(variant.plan),
        share_prompt=variant.layout == "shared",
        share_response_start=variant.share_response_start,
        gradient_checkpointing=variant.gradient_checkpointing,
        score_recompute=variant.score_recompute,
        reference=variant.reference,
    )


def assumed_pairs(prompt: int, chosen: int, rejected: int, count: int) -> list[PreferencePair]:
    """Pairs of given lengths whose responses differ from their first token on, so that none of it is shared."""
    ids = np.zeros(prompt, dtype=np.int64)
    return [
        PreferencePair(i, ids, np.zeros(chosen, dtype=np.int64), np.ones(rejected, dtype=np.int64), "assumed")
        for i in range(count)
    ]


def assumed_lengths(config: StochDPOConfig, max_length: int) -> tuple[int, int]:
    """Prompt and response that fill `max_length`: the longest prompt allowed, or half of it, and the rest."""
    prompt = min(config.max_prompt_length or max_length // 2, max_length - 1)
    return prompt, max_length - prompt


def forecast(
    pairs: Sequence[PreferencePair],
    config: StochDPOConfig,
    shape: ModelShape,
    *,
    world_size: int,
    variant: Variant | None = None,
    attention: AttentionCount = "causal",
    recomputes_all: bool = False,
) -> Forecast:
    """Draw the first optimizer steps of a run and count what they hold.

    Args:
        pairs: Training pairs, at least one.
        config: Settings with batch sizes resolved.
        shape: The model.
        world_size: Ranks.
        variant: How batches are executed; None: as the settings say. A padded one is cut by pairs alone, in their
            order, as its collator does.
        attention: See `step_work`.
        recomputes_all: See `step_work`.

    Returns:
        The counts.
    """
    assert config.per_device_train_batch_size is not None
    assert config.gradient_accumulation_steps is not None
    pairs_per_step = world_size * config.per_device_train_batch_size * config.gradient_accumulation_steps
    variant = variant or variant_of(config)
    if variant.layout != "padded":
        config = settings_for(config, variant)
    windows = step_batches(epoch_order(len(pairs), config.seed, 0), pairs_per_step)[:MOST_STEPS]
    total, num_pairs, num_micro, imbalances = StepWork(), 0, 0, []
    largest: MicroBatch | None = None
    for step, window in enumerate(windows):
        chosen = [pairs[i] for i in window]
        draws = draw(chosen, config, epoch=0, step=step)
        rank_work = []
        for share in _shares(chosen, draws, config, variant, shape, world_size):
            micros = [
                _micro_batch([chosen[i] for i in micro], [draws[i] for i in micro], variant, shape,
                             attention=attention, recomputes_all=recomputes_all)
                for micro in share
            ]  # fmt: skip
            largest = max(filter(None, [largest, *micros]), key=_size, default=None)
            num_micro = max(num_micro, len(micros))
            own = sum((micro.work for micro in micros), StepWork())
            rank_work.append(own.total)
            total += own
        num_pairs += len(chosen)
        imbalances.append(max(rank_work) * world_size / sum(rank_work))
    assert largest is not None
    return Forecast(num_pairs, total.scaled(1 / num_pairs), float(np.mean(imbalances)), num_micro, largest)


def _size(micro: MicroBatch) -> tuple[float, float, float]:
    return micro.work.tokens_backward, micro.work.tokens_executed, micro.work.tokens_scored


def _shares(
    pairs: Sequence[PreferencePair],
    draws: Sequence[PairDraw],
    config: StochDPOConfig,
    variant: Variant,
    shape: ModelShape,
    world_size: int,
) -> list[list[list[int]]]:
    """Micro-batches of every rank, as indices of pairs."""
    assert config.per_device_train_batch_size is not None
    most = config.per_device_train_batch_size
    if variant.layout == "padded":
        ranks = [list(range(rank, len(pairs), world_size)) for rank in range(world_size)]
        return [[own[i : i + most] for i in range(0, len(own), most)] for own in ranks]
    shares = {"share_prompt": config.share_prompt, "share_response_start": config.share_response_start}
    tokens = [lane_tokens(p, d, **shares).total for p, d in zip(pairs, draws, strict=True)]
    costs = [
        pair_cost(
            shape,
            pair_tokens(p, d, share_response_start=config.share_response_start),
            share_prompt=config.share_prompt,
        )
        for p, d in zip(pairs, draws, strict=True)
    ]
    limits = BatchLimits(most, config.max_tokens_per_micro_batch)
    return [
        [[own[i] for i in micro] for micro in cut_micro_batches([tokens[i] for i in own], limits)]
        for own in assign_to_ranks(costs, world_size)
    ]


def _micro_batch(
    pairs: Sequence[PreferencePair],
    draws: Sequence[PairDraw],
    variant: Variant,
    shape: ModelShape,
    *,
    attention: AttentionCount,
    recomputes_all: bool,
) -> MicroBatch:
    lengths = [pair_lengths(pair) for pair in pairs]
    work = step_work(shape, lengths, draws, variant, attention=attention, recomputes_all=recomputes_all)
    return MicroBatch(tuple(pairs), tuple(draws), work)
