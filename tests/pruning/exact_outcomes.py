"""Every outcome of a draw with its probability, for expectations without sampling error."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from ds_stochdpo.config import PruningPlan
from ds_stochdpo.pruning import BranchDraw, draw_response, num_uniforms, prefix_law
from ds_stochdpo.pruning.positions import block_edges


def intervals(breakpoints: Iterable[float]) -> list[tuple[float, float]]:
    """(length, middle) of each interval into which the breakpoints cut [0, 1)."""
    inner = [point for point in breakpoints if 0.0 < point < 1.0]
    edges = np.unique(np.round([0.0, *inner, 1.0], 15))
    return [(b - a, (a + b) / 2) for a, b in itertools.pairwise(edges) if b - a > 1e-13]


def position_outcomes(sampler: str, keep: float, lengths: list[int]) -> Iterator[tuple[float, np.ndarray]]:
    """(probability, uniforms) of every joint outcome of responses that share their numbers."""
    longest = max(lengths)
    if sampler == "systematic":
        for prob, middle in intervals(np.ceil(keep * t) - keep * t for t in range(1, longest + 1)):
            yield prob, np.array([middle])
    elif sampler == "bernoulli":
        for is_in in itertools.product([True, False], repeat=longest):
            prob = np.prod([keep if z else 1.0 - keep for z in is_in])
            yield float(prob), np.array([keep / 2 if z else (1.0 + keep) / 2 for z in is_in])
    elif sampler == "fixed":
        orders = list(itertools.permutations(range(longest)))
        for order in orders:
            yield 1.0 / len(orders), (np.array(order) + 0.5) / longest
    else:
        num_blocks = max(num_uniforms(sampler, length, keep) for length in lengths)
        sizes = [np.diff(block_edges(length, keep)) for length in lengths]
        per_block = [intervals(i / s[j] for s in sizes if j < len(s) for i in range(s[j])) for j in range(num_blocks)]
        for combination in itertools.product(*per_block):
            probs, middles = zip(*combination, strict=True)
            yield float(np.prod(probs)), np.array(middles)


def prefix_outcomes(plan: PruningPlan, lengths: list[int]) -> list[tuple[float, float]]:
    """(probability, uniform) of every joint outcome of the prefixes."""
    return intervals(p for length in lengths for p in law_of(plan, length).survival_probs)


def law_of(plan: PruningPlan, length: int):
    return prefix_law(length, keep=plan.prefix_keep, sampler=plan.prefix_sampler, min_survival=plan.prefix_min_survival)


def response_outcomes(plan: PruningPlan, lengths: list[int]) -> Iterator[tuple[float, list[BranchDraw]]]:
    """(probability, one draw a response) over all positions and prefixes."""
    for prefix_prob, u in prefix_outcomes(plan, lengths):
        for prob, v in position_outcomes(plan.position_sampler, plan.position_keep, lengths):
            draws = [draw_response(plan, n, prefix_uniform=u, position_uniforms=v) for n in lengths]
            yield prefix_prob * prob, draws


def moments(
    plan: PruningPlan, values: list[np.ndarray], estimate: Callable[[list[BranchDraw]], float] | None = None
) -> tuple[float, float]:
    """Mean and variance of an estimate; by default the weighted sum over the first response."""
    estimate = estimate or (lambda draws: weighted_sum(draws[0], values[0]))
    outcomes = [(prob, estimate(draws)) for prob, draws in response_outcomes(plan, [len(v) for v in values])]
    probs, results = (np.array(column) for column in zip(*outcomes, strict=True))
    assert abs(probs.sum() - 1.0) < 1e-12
    mean = float(probs @ results)
    return mean, float(probs @ (results - mean) ** 2)


def weighted_sum(draw: BranchDraw, values: np.ndarray) -> float:
    return float(draw.weights @ values[draw.positions])
