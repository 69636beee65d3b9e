"""Which pairs form which optimizer step.

Floor: data. Entry: `epoch_order`, then `step_batches`. Both are pure functions, so every rank and every
resumed run has the same steps.
"""

from __future__ import annotations

import numpy as np

from ds_stochdpo.pruning.rng import permutation


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
