"""How the pairs of one optimizer step are drawn, spread over ranks and cut into micro-batches.

Pure functions of lengths and draws, so every rank can compute the plan of all ranks.
Entry: `draw`, `assign_to_ranks`, `cut_micro_batches`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.data.pair import PreferencePair
from ds_stochdpo.errors import ConfigError
from ds_stochdpo.pruning.cost import PairLengths, PairTokens, drawn_tokens, pair_lanes
from ds_stochdpo.pruning.draws import PairDraw, draw_pairs


def draw(pairs: Sequence[PreferencePair], config: StochDPOConfig, *, epoch: int = 0, step: int = 0) -> list[PairDraw]:
    """The three choices for the pairs of one optimizer step, before anything is run.

    Args:
        pairs: The pairs of the step over all ranks: a balanced branch draw looks at all of them.
        config: Settings; only the pruning and the seed are read.
        epoch: Pass over the data, from 0.
        step: Optimizer step, from 0; balanced branch draws depend on it.

    Returns:
        One draw for each pair, in order: a pure function of seed, epoch, step, ids and lengths, independent of world
        size and of the order of the pairs (METHOD.md M20).

    Raises:
        ConfigError: If `prefix_keep` cannot be reached by its sampler.
    """
    lengths = [(p.pair_id, len(p.chosen_ids), len(p.rejected_ids)) for p in pairs]
    return draw_lengths(lengths, config, epoch=epoch, step=step)


def draw_lengths(
    lengths: Sequence[tuple[int, int, int]], config: StochDPOConfig, *, epoch: int, step: int
) -> list[PairDraw]:
    """`draw` for pairs that are elsewhere: (pair id, chosen tokens, rejected tokens) of each is all it takes."""
    return draw_pairs(
        config.pruning,
        seed=config.seed,
        epoch=epoch,
        step=step,
        pair_ids=[row[0] for row in lengths],
        chosen_lengths=[row[1] for row in lengths],
        rejected_lengths=[row[2] for row in lengths],
    )


def check_draws(pairs: Sequence[PreferencePair], draws: Sequence[PairDraw]) -> None:
    """Refuse draws that cannot belong to these pairs.

    Raises:
        ConfigError: If the counts differ, or a draw reaches behind its response.
    """
    if len(pairs) != len(draws):
        raise ConfigError(f"{len(pairs)} pairs but {len(draws)} draws; give one draw for each pair, in the same order.")
    for pair, drawn in zip(pairs, draws, strict=True):
        for response, side in ((pair.chosen_ids, drawn.chosen), (pair.rejected_ids, drawn.rejected)):
            reach = max(side.prefix_tokens, int(side.positions[-1]) + 1 if len(side.positions) else 0)
            if reach > len(response):
                raise ConfigError(
                    f"pair {pair.pair_id} has a response of {len(response)} tokens, but its draw reaches {reach}; "
                    "give draws in the order of the pairs."
                )


@dataclass(frozen=True)
class LaneTokens:
    """Tokens one pair puts into the live and the frozen lane."""

    live: int
    frozen: int

    @property
    def total(self) -> int:
        """Tokens run for the pair."""
        return self.live + self.frozen


@dataclass(frozen=True)
class BatchLimits:
    """What one micro-batch of one rank may hold.

    Attributes:
        max_pairs: Most pairs.
        max_tokens: Most tokens run, both lanes together; None: no limit. A single pair above it runs alone.
    """

    max_pairs: int
    max_tokens: int | None = None


def lane_tokens(
    pair: PreferencePair, draw: PairDraw, *, share_prompt: bool = True, share_response_start: bool = True
) -> LaneTokens:
    """Tokens `pack_lanes` will run for a pair, without building the lanes.

    Args:
        pair: The pair.
        draw: What was drawn for it.
        share_prompt: As in `pack_lanes`.
        share_response_start: As in `pack_lanes`.

    Returns:
        Tokens of both lanes.
    """
    tokens = pair_tokens(pair, draw, share_response_start=share_response_start)
    lanes = pair_lanes(tokens, share_prompt=share_prompt)
    return LaneTokens(lanes.live_tokens, lanes.frozen_tokens)


def pair_lengths(pair: PreferencePair) -> PairLengths:
    """Lengths of a pair, in the terms of `pruning.step_work`."""
    return PairLengths(len(pair.prompt_ids), len(pair.chosen_ids), len(pair.rejected_ids), pair.shared_start)


def pair_tokens(pair: PreferencePair, draw: PairDraw, *, share_response_start: bool = True) -> PairTokens:
    """What a drawn pair costs, in the terms of `pruning.pair_cost`.

    Args:
        pair: The pair.
        draw: What was drawn for it.
        share_response_start: As in `pack_lanes`; a shared start counts as prompt.

    Returns:
        Tokens run and positions scored of each part.
    """
    return drawn_tokens(pair_lengths(pair), draw, share_response_start=share_response_start)


def assign_to_ranks(costs: Sequence[int], world_size: int) -> list[list[int]]:
    """Spread pairs over ranks so that the dearest rank is cheap, with pair counts within 1 of each other.

    Longest first, each to the cheapest rank that still has room; deterministic.

    >>> assign_to_ranks([5, 1, 4, 2], 2)
    [[0, 1], [2, 3]]

    Args:
        costs: Work of each pair, in any unit.
        world_size: Number of ranks.

    Returns:
        For each rank the indices of its pairs, ascending; a rank may get none.
    """
    small, num_larger = divmod(len(costs), world_size)
    shares: list[list[int]] = [[] for _ in range(world_size)]
    # Heaps of (load, rank): ranks with fewer than `small` pairs, and those that could take one more than that.
    below = [(0, rank) for rank in range(world_size)] if small else []
    full = [] if small else [(0, rank) for rank in range(world_size)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        takes_extra = not below or (num_larger > 0 and bool(full) and full[0] < below[0])
        load, rank = heapq.heappop(full if takes_extra else below)
        shares[rank].append(index)
        if takes_extra:
            num_larger -= 1
        else:
            heapq.heappush(below if len(shares[rank]) < small else full, (load + costs[index], rank))
    return [sorted(share) for share in shares]


def cut_micro_batches(tokens: Sequence[int], limits: BatchLimits) -> list[list[int]]:
    """Cut one rank's pairs of a step into micro-batches that keep the limits.

    Without a token limit the micro-batches get equal counts and even tokens, so ranks in lock-step wait little; with
    one, first fit in order of falling length, so the fullest comes first and a lack of memory shows early.

    >>> cut_micro_batches([10, 90, 40], BatchLimits(max_pairs=2, max_tokens=100))
    [[0, 1], [2]]

    Args:
        tokens: Tokens each pair runs.
        limits: Most pairs and tokens.

    Returns:
        Indices of each micro-batch, ascending; empty for no pairs.
    """
    if not tokens:
        return []
    if limits.max_tokens is None:
        return assign_to_ranks(tokens, -(-len(tokens) // limits.max_pairs))
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
        fits = [b for b in range(len(bins)) if room[b] >= tokens[index] and len(bins[b]) < limits.max_pairs]
        if fits:
            bins[fits[0]].append(index)
            room[fits[0]] -= tokens[index]
        else:
            bins.append([index])
            room.append(limits.max_tokens - tokens[index])
    return [sorted(b) for b in bins]
