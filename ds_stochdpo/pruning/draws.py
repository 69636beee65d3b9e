"""The record of what was drawn for a pair, and the one function that draws it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

Kept = Literal["both", "chosen", "rejected"]


@dataclass(frozen=True, eq=False)
class BranchDraw:
    """What one response contributes to the estimate of its log-ratio.

    Attributes:
        prefix_tokens: K, number of leading response tokens that may be run and scored, in [1, T].
        positions: Scored response positions, 0-based, sorted, all below `prefix_tokens`; int64 [n], n >= 0.
        weights: Inverse probability of each scored position, 1 / (q_t * P(K >= t)); float64 [n].
    """

    prefix_tokens: int
    positions: np.ndarray
    weights: np.ndarray


@dataclass(frozen=True, eq=False)
class PairDraw:
    """The three independent choices for one pair, made before anything is run.

    Attributes:
        chosen: Positions and prefix of the chosen response.
        rejected: Positions and prefix of the rejected response.
        kept: Branch or branches that are back-propagated.
        kept_prob: Probability with which `kept` was drawn, in (0, 1]; 1 for both.
    """

    chosen: BranchDraw
    rejected: BranchDraw
    kept: Kept = "both"
    kept_prob: float = 1.0
