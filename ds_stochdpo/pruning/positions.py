"""Position pruning: which response positions are scored, and with which probability (METHOD.md section 2).

Every design works on the whole response of T tokens. Entry: `sample_positions`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


def sample_positions(sampler: str, length: int, keep: float, uniforms: FloatArray) -> tuple[IntArray, FloatArray]:
    """Scored positions of one response.

    The sample can be empty under `bernoulli` and `systematic`; the response then adds 0 to the estimate,
    which its weight in the other outcomes makes up for. A rate of 1 returns every position under every
    design.

    Args:
        sampler: systematic, bernoulli, fixed or stratified (METHOD.md M6).
        length: T, response tokens, at least 1.
        keep: q, expected share of the positions, in (0, 1].
        uniforms: At least `num_uniforms(sampler, length, keep)` numbers in [0, 1); both branches of a pair
            pass the same.

    Returns:
        positions: 0-based, ascending; int64 [n].
        inclusion_prob: Probability with which each of them is drawn; float64 [n].

    Raises:
        ValueError: If the length, the rate or the sampler is not allowed, or numbers are missing.

    Example:
        >>> positions, prob = sample_positions("systematic", 6, 0.5, np.array([0.25]))
        >>> positions.tolist(), prob.tolist()
        ([1, 3, 5], [0.5, 0.5, 0.5])
    """
    _check(sampler, length, keep)
    needed = num_uniforms(sampler, length, keep)
    if len(uniforms) < needed:
        raise ValueError(f"uniforms has {len(uniforms)} numbers; {sampler} needs {needed} for {length} positions.")
    if keep == 1.0:
        positions = np.arange(length, dtype=np.int64)
    else:
        positions = _SAMPLERS[sampler](length, keep, uniforms[:needed])
    return positions, inclusion_probs(sampler, length, keep)[positions]


def inclusion_probs(sampler: str, length: int, keep: float) -> FloatArray:
    """Probability with which a design scores each position, drawn or not; float64 [T].

    Example:
        >>> inclusion_probs("stratified", 5, 0.4).tolist()
        [0.5, 0.5, 0.3333333333333333, 0.3333333333333333, 0.3333333333333333]
    """
    _check(sampler, length, keep)
    if sampler == "fixed":
        return np.full(length, _sample_size(length, keep) / length)
    if sampler == "stratified":
        sizes = np.diff(block_edges(length, keep))
        return np.repeat(1.0 / sizes, sizes)
    return np.full(length, float(keep))


def num_uniforms(sampler: str, length: int, keep: float) -> int:
    """How many uniforms a design uses on a response of `length` tokens."""
    _check(sampler, length, keep)
    if sampler == "systematic":
        return 1
    return _sample_size(length, keep) if sampler == "stratified" else length


def block_edges(length: int, keep: float) -> IntArray:
    """Block borders of the stratified design: block j is edges[j] to edges[j + 1] - 1; int64 [n + 1].

    One position is drawn from each of n = max(1, round(q T)) blocks, so the expected share is n / T, the
    nearest to q that a whole number of blocks can give. Block lengths differ by at most one token.
    """
    num_blocks = _sample_size(length, keep)
    return np.arange(num_blocks + 1, dtype=np.int64) * length // num_blocks


def _systematic(length: int, keep: float, uniforms: FloatArray) -> IntArray:
    steps = np.floor(keep * np.arange(length + 1) + uniforms[0])
    # "> 0" and not "== 1": with a rate near 1 and u near 1, rounding can put both jumps on one position.
    return np.flatnonzero(np.diff(steps) > 0).astype(np.int64)


def _bernoulli(length: int, keep: float, uniforms: FloatArray) -> IntArray:
    return np.flatnonzero(uniforms < keep).astype(np.int64)


def _fixed(length: int, keep: float, uniforms: FloatArray) -> IntArray:
    smallest = np.argsort(uniforms, kind="stable")[: _sample_size(length, keep)]
    return np.sort(smallest).astype(np.int64)


def _stratified(length: int, keep: float, uniforms: FloatArray) -> IntArray:
    edges = block_edges(length, keep)
    sizes = np.diff(edges)
    # u * size can round up to size when u is the last float below 1.
    offsets = np.minimum((uniforms * sizes).astype(np.int64), sizes - 1)
    return edges[:-1] + offsets


_SAMPLERS: dict[str, Callable[[int, float, FloatArray], IntArray]] = {
    "systematic": _systematic,
    "bernoulli": _bernoulli,
    "fixed": _fixed,
    "stratified": _stratified,
}


def _sample_size(length: int, keep: float) -> int:
    return max(1, round(keep * length))


def _check(sampler: str, length: int, keep: float) -> None:
    if sampler not in _SAMPLERS:
        raise ValueError(f"position_sampler is {sampler!r}; allowed: {', '.join(_SAMPLERS)}.")
    if length < 1:
        raise ValueError(f"length is {length}; a response has at least one token.")
    if not 0.0 < keep <= 1.0:
        raise ValueError(f"position_keep is {keep}; it must be in (0, 1], else a position could never be scored.")
