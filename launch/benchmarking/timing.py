"""Interleaved rounds: every variant takes its turn in each, so that a busy machine slows all of them alike.

Entry: `time_variants`, `ratio`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm

Rounds = list[list[float]]
"""Seconds of every step, by round."""


@dataclass(frozen=True)
class Ratio:
    """How many times faster one variant is than another.

    Attributes:
        median: Of the rounds' ratios.
        low: Smallest of them.
        high: Largest of them.
        mean: Total time of the one over total time of the other, per step: the figure for variants whose work is
            drawn, where a median would leave out the dear draws.
    """

    median: float
    low: float
    high: float
    mean: float


def time_variants(
    steps: Mapping[str, Callable[[int], float]], num_rounds: int, turns_of: Callable[[str, int], Sequence[int]]
) -> dict[str, Rounds]:
    """Run all variants in turn, after one warm-up step of each.

    Args:
        steps: By name, what takes one step of a turn and returns its seconds.
        num_rounds: Timed rounds.
        turns_of: Turns that a variant takes in a round; several for variants whose work is drawn.
    """
    rounds: dict[str, Rounds] = {name: [] for name in steps}
    total = len(steps) * (1 + num_rounds)
    with tqdm(total=total, desc="steps in turn", unit="variant", mininterval=5) as bar:
        for step in steps.values():
            step(0)
            bar.update()
        for number in range(1, num_rounds + 1):
            for name, step in steps.items():
                rounds[name].append([step(turn) for turn in turns_of(name, number)])
                bar.update()
    return rounds


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call: CUDA events on a GPU, wall clock elsewhere."""
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000.0


def ratio(slow: Rounds, fast: Rounds) -> Ratio:
    """How many times faster `fast` is, round by round."""
    per_round = [
        statistics.fmean(a) / statistics.fmean(b) for a, b in zip(slow, fast, strict=True)
    ]  # fmt: skip
    mean = statistics.fmean(map(statistics.fmean, slow)) / statistics.fmean(map(statistics.fmean, fast))
    return Ratio(statistics.median(per_round), min(per_round), max(per_round), mean)
