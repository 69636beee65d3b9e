"""Which pairs form which optimizer step.

Floor: data. Entry: `SetWindows`; a stream has windows of its own (`stream.py`). The pairs of a step are a pure
function of the set, the seed and the step, so every rank and every resumed run has the same steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ds_stochdpo.data.pair import PreferencePair
from ds_stochdpo.pruning.rng import permutation


@dataclass(frozen=True)
class Window:
    """The pairs of one optimizer step over all ranks.

    Attributes:
        epoch: Pass over the data, from 0, whose draws they get.
        pairs: In order; the last window of a pass may be short.
    """

    epoch: int
    pairs: list[PreferencePair]


class Windows(Protocol):
    """Where the pairs of a run's optimizer steps come from."""

    def take(self, step: int) -> Window:
        """The window of an optimizer step, counted from 0."""
        ...

    def passes(self, step: int) -> float:
        """Passes over the data in the optimizer steps before `step`."""
        ...


class SetWindows:
    """Windows of a set that is in memory, in a new order each epoch."""

    def __init__(self, pairs: Sequence[PreferencePair], *, seed: int, pairs_per_step: int) -> None:
        """Set up the windows.

        Args:
            pairs: The set, at least one pair.
            seed: Seed of the order.
            pairs_per_step: Pairs of one optimizer step over all ranks, at least 1.
        """
        self.pairs, self.seed, self.pairs_per_step = pairs, seed, pairs_per_step
        self._steps_per_epoch = -(-len(pairs) // pairs_per_step)

    def take(self, step: int) -> Window:
        """The window of any optimizer step, counted from 0."""
        epoch, index = divmod(step, self._steps_per_epoch)
        batches = step_batches(epoch_order(len(self.pairs), self.seed, epoch), self.pairs_per_step)
        return Window(epoch, [self.pairs[i] for i in batches[index]])

    def passes(self, step: int) -> float:
        """Passes over the set in the optimizer steps before `step`; a short window counts as a whole one."""
        return step / self._steps_per_epoch


def epoch_order(num_pairs: int, seed: int, epoch: int) -> np.ndarray:
    """Shuffled positions of the pairs for one epoch.

    Args:
        num_pairs: Pairs in the set.
        seed: Seed of the run.
        epoch: Epoch from 0; each has its own order.

    Returns:
        Positions in the list of pairs (not pair ids), int64 [num_pairs].
    """
    return permutation(seed, epoch, num_pairs)


def step_batches(order: np.ndarray, pairs_per_step: int) -> list[np.ndarray]:
    """Cut an order into optimizer steps; the last one takes what is left and may be short.

    Args:
        order: Positions as `epoch_order` gives them.
        pairs_per_step: Pairs of one optimizer step over all ranks, at least 1.
    """
    if pairs_per_step < 1:
        raise ValueError(f"pairs_per_step is {pairs_per_step}; it must be at least 1")
    return [order[start : start + pairs_per_step] for start in range(0, len(order), pairs_per_step)]
