"""Counter-based random numbers: every draw is a pure function of what it is drawn for.

Nothing here holds state, so a draw does not change with world size, order, resume or other draws (METHOD.md
M20). Entry: `uniform`.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

_UINT64_END = 1 << 64
# Top 53 of 64 raw bits, the resolution of a float64 in [0, 1).
_DROPPED_BITS = 11
_RESOLUTION = 2.0**-53


class Purpose(IntEnum):
    """What a stream is used for. The numbers are part of the draw: never renumber them."""

    POSITIONS = 1
    PREFIX = 2
    BRANCH = 3
    BRANCH_STEP = 4
    ORDER = 5


def uniform(
    seed: int, purpose: Purpose, epoch: int, item_id: int, *, step: int = 0, count: int = 1
) -> NDArray[np.float64]:
    """Independent uniforms in [0, 1) that belong to one item.

    The first n of a longer draw equal a draw of n, which lets responses of unequal length share their
    numbers.

    Args:
        seed: Seed of the run, in [0, 2**64).
        purpose: Which choice the numbers are for; streams of two purposes are independent.
        epoch: Pass over the pairs, from 0.
        item_id: Pair id, or 0 for a draw that belongs to a whole step.
        step: Optimizer step, for draws over the pairs of one step; else 0.
        count: How many numbers.

    Returns:
        float64 [count].

    Raises:
        ValueError: If a key is negative or needs more than 64 bits.

    Example:
        >>> two, five = (uniform(0, Purpose.PREFIX, 0, 7, count=n) for n in (2, 5))
        >>> bool((five[:2] == two).all())
        True
    """
    raw = _raw(seed, purpose, epoch, item_id, step, count)
    return (raw >> np.uint64(_DROPPED_BITS)).astype(np.float64) * _RESOLUTION


def permutation(seed: int, epoch: int, n: int) -> NDArray[np.int64]:
    """Order in which the pairs of an epoch are visited.

    Args:
        seed: Seed of the run.
        epoch: Pass over the pairs, from 0.
        n: Number of pairs.

    Returns:
        int64 [n], each of 0..n-1 once.

    Example:
        >>> sorted(permutation(3, 0, 4).tolist())
        [0, 1, 2, 3]
    """
    # Sorting raw keys, unlike Generator.permutation, rests on no algorithm that numpy may change.
    return np.argsort(_raw(seed, Purpose.ORDER, epoch, 0, 0, n), kind="stable").astype(np.int64)


def _raw(seed: int, purpose: Purpose, epoch: int, item_id: int, step: int, count: int) -> NDArray[np.uint64]:
    for name, value in (("seed", seed), ("epoch", epoch), ("item_id", item_id), ("step", step)):
        if not 0 <= int(value) < _UINT64_END:
            raise ValueError(f"{name} is {value}; random streams are keyed by whole numbers in [0, 2**64).")
    # Word 0 counts the blocks of a stream, so streams of different items cannot run into each other.
    counter = np.array([0, int(item_id), int(step), int(epoch)], dtype=np.uint64)
    key = np.array([int(seed), int(purpose)], dtype=np.uint64)
    return np.random.Philox(counter=counter, key=key).random_raw(count)
