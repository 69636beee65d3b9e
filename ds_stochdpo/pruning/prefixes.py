"""Sequence pruning: which response prefix is run, and how likely each position is (METHOD.md section 3).

Entry: `prefix_law`; `check_prefix_feasible` answers at configuration time, before any length is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ds_stochdpo.config import PREFIX_SAMPLERS, PruningPlan
from ds_stochdpo.errors import ConfigError

FloatArray = NDArray[np.float64]

# A geometric law has no floor: its last token is reached with x, (1 - x) / -log(x) = prefix_keep. Weights
# above 1 / this make the estimate useless, so such rates are refused.
GEOMETRIC_LEAST_SURVIVAL = 1e-3
# Absorbs rounding of rates written in decimals, such as prefix_keep 0.65 with rho 0.3.
_RATE_TOLERANCE = 1e-9
_BISECTIONS = 100


@dataclass(frozen=True, eq=False)
class PrefixLaw:
    """Law of the prefix length K of one response.

    Attributes:
        survival_probs: P(K >= t) for t = 1..T at index t - 1; non-increasing, 1 at index 0, positive; float64
            [T].
    """

    survival_probs: FloatArray

    @property
    def length(self) -> int:
        """T, the number of response tokens."""
        return len(self.survival_probs)

    @property
    def mean(self) -> float:
        """E[K], in tokens."""
        return float(self.survival_probs.sum())

    def survival(self, t: int) -> float:
        """P(K >= t), for t in 1..T."""
        if not 1 <= t <= self.length:
            raise ValueError(f"t is {t}; it must be in 1..{self.length}.")
        return float(self.survival_probs[t - 1])

    def quantile(self, uniform: float) -> int:
        """K, in 1..T, as the number of t with P(K >= t) > `uniform`.

        It falls as `uniform` grows; both branches of a pair pass the same number, so that they are cut
        together (M11).
        """
        return self.length - int(np.searchsorted(self.survival_probs[::-1], uniform, side="right"))


def prefix_law(length: int, *, keep: float, sampler: str, min_survival: float) -> PrefixLaw:
    """Law of K on 1..T with E[K] = keep * T (METHOD.md M9).

    E[K] is met exactly by mixing the laws of two neighbouring whole numbers. It comes out larger, by less
    than one token, only where the solved start of the law lies below the first token, or where a geometric
    law would hardly ever reach the last one. `uniform` and `geometric` do not use `min_survival`.

    Args:
        length: T, response tokens, at least 1.
        keep: E[K] / T, in (0, 1]; 1 runs every response whole.
        sampler: two_point, floor, uniform or geometric.
        min_survival: rho, probability of the whole response under two_point and floor, in (0, 1].

    Returns:
        The law; P(K >= T) is positive, without which no weight could make the estimate unbiased.

    Raises:
        ConfigError: If no law of this kind has that mean.
        ValueError: If the length is below 1.

    Example:
        >>> prefix_law(8, keep=0.5, sampler="two_point", min_survival=0.2).survival_probs.round(3).tolist()
        [1.0, 1.0, 1.0, 0.2, 0.2, 0.2, 0.2, 0.2]
    """
    if length < 1:
        raise ValueError(f"length is {length}; a response has at least one token.")
    _check_feasible(keep, sampler, min_survival)
    if keep >= 1.0 - _RATE_TOLERANCE or length == 1:
        return PrefixLaw(np.ones(length))
    if sampler == "geometric":
        return PrefixLaw(np.exp(-_geometric_rate(length, keep) * np.arange(length)))
    rho = 0.0 if sampler == "uniform" else min_survival
    rest = (keep - rho) / (1.0 - rho)
    if sampler == "two_point":
        rest_L = _mix(_point_survival, length, rest * length)
    else:
        rest_L = _mix(_uniform_survival, length, (2.0 * rest - 1.0) * length)
    return PrefixLaw(rho + (1.0 - rho) * rest_L)


def prefix_keep_range(sampler: str, min_survival: float) -> tuple[float, float]:
    """Least and greatest E[K] / T that a law reaches on long responses.

    Example:
        >>> prefix_keep_range("floor", 0.25)
        (0.625, 1.0)
    """
    if sampler not in PREFIX_SAMPLERS:
        raise ConfigError(f"prefix_sampler is {sampler!r}; allowed: {', '.join(PREFIX_SAMPLERS)}.")
    lowest = {
        "two_point": min_survival,
        "floor": (1.0 + min_survival) / 2.0,
        "uniform": 0.5,
        "geometric": (1.0 - GEOMETRIC_LEAST_SURVIVAL) / -math.log(GEOMETRIC_LEAST_SURVIVAL),
    }
    return lowest[sampler], 1.0


def check_prefix_feasible(plan: PruningPlan) -> None:
    """Raise ConfigError, naming the range, if no prefix law has the plan's mean on long responses."""
    _check_feasible(plan.prefix_keep, plan.prefix_sampler, plan.prefix_min_survival)


def _check_feasible(keep: float, sampler: str, min_survival: float) -> None:
    low, high = prefix_keep_range(sampler, min_survival)
    if not 0.0 < min_survival <= 1.0:
        raise ConfigError(f"prefix_min_survival is {min_survival}; it must be in (0, 1].")
    if low - _RATE_TOLERANCE <= keep <= high:
        return
    uses_rho = sampler in ("two_point", "floor")
    with_rho = f" with prefix_min_survival {min_survival:g}" if uses_rho else ""
    remedy = "raise prefix_keep" + (" or lower prefix_min_survival" if uses_rho else " or choose two_point")
    raise ConfigError(
        f"prefix_keep is {keep:g}, but prefix_sampler {sampler}{with_rho} reaches only [{low:.4g}, {high:g}]; {remedy}."
    )


def _mix(survival_of: Callable[[int, int], FloatArray], length: int, start: float) -> FloatArray:
    """Survival of a law that starts at a real number, clamped to 1..T: its two neighbours, mixed."""
    if abs(start - round(start)) < _RATE_TOLERANCE * length:
        start = round(start)
    start = min(max(start, 1.0), float(length))
    below = min(int(start), length - 1)
    lower_L, upper_L = survival_of(length, below), survival_of(length, below + 1)
    return lower_L + (start - below) * (upper_L - lower_L)


def _point_survival(length: int, start: int) -> FloatArray:
    """P(K >= t) for K = start."""
    return (np.arange(1, length + 1) <= start).astype(np.float64)


def _uniform_survival(length: int, start: int) -> FloatArray:
    """P(K >= t) for K uniform on start..T."""
    return np.minimum(1.0, np.arange(length, 0, -1) / (length - start + 1.0))


def _geometric_rate(length: int, keep: float) -> float:
    """Rate a of P(K >= t) = exp(-a (t - 1)) with mean keep * T."""
    # On a short response the mean alone can make the last token unreachable: it is kept at least half as
    # likely as on a long one.
    target = keep * length
    high = (_decay_of_share(keep) + math.log(2.0)) / (length - 1)
    if _geometric_mean(length, high) >= target:
        return high
    return _bisect(lambda rate: _geometric_mean(length, rate) - target, 0.0, high)


def _geometric_mean(length: int, rate: float) -> float:
    return math.expm1(-rate * length) / math.expm1(-rate) if rate > 0.0 else float(length)


def _decay_of_share(keep: float) -> float:
    """Total decay d of a long response, (1 - exp(-d)) / d = keep."""
    return _bisect(lambda decay: -math.expm1(-decay) / decay - keep, 1e-12, 1.0 / keep)


def _bisect(decreasing: Callable[[float], float], low: float, high: float) -> float:
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if decreasing(middle) > 0.0 else (low, middle)
    return (low + high) / 2.0
