"""The record of what was drawn for a pair, and the one function that draws it (METHOD.md section 6).

Entry: `draw_pairs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ds_stochdpo.config import PruningPlan
from ds_stochdpo.pruning.branches import draw_branches
from ds_stochdpo.pruning.positions import num_uniforms, sample_positions
from ds_stochdpo.pruning.prefixes import prefix_law
from ds_stochdpo.pruning.rng import Purpose, uniform

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


def draw_pairs(
    plan: PruningPlan,
    *,
    seed: int,
    epoch: int,
    step: int,
    pair_ids: Sequence[int],
    chosen_lengths: Sequence[int],
    rejected_lengths: Sequence[int],
) -> list[PairDraw]:
    """Draw the pairs of one optimizer step, all ranks' pairs together.

    Positions and prefixes depend on (seed, epoch, pair id) and the pair's own lengths; so does the branch
    under `branch_balance: iid`. A balanced branch depends on (seed, epoch, step) and the set of pairs
    given.

    Args:
        plan: What is sampled and how.
        seed: Seed of the run.
        epoch: Pass over the pairs, from 0.
        step: Optimizer step.
        pair_ids: Ids of the pairs of the step, each once.
        chosen_lengths: T_w of each pair, the whole response with its end token, shared start included.
        rejected_lengths: T_l of each pair.

    Returns:
        One draw a pair, in the order given. A sample of positions may be empty: the pair then contributes 0
        here.

    Raises:
        ConfigError: If no prefix law has the plan's mean.
        ValueError: If the three sequences differ in length or a response has no token.

    Example:
        >>> plan = PruningPlan(position_keep=0.5, branch="single")
        >>> pairs = dict(pair_ids=[3], chosen_lengths=[6], rejected_lengths=[4])
        >>> draw = draw_pairs(plan, seed=0, epoch=0, step=0, **pairs)[0]
        >>> len(draw.chosen.positions), draw.chosen.weights.tolist(), draw.kept_prob
        (3, [2.0, 2.0, 2.0], 0.5)
    """
    num_pairs = len(pair_ids)
    if not num_pairs == len(chosen_lengths) == len(rejected_lengths):
        raise ValueError(
            f"pair_ids, chosen_lengths and rejected_lengths have {num_pairs}, {len(chosen_lengths)} and "
            f"{len(rejected_lengths)} items; give one of each for every pair."
        )
    kept: list[tuple[Kept, float]] = [("both", 1.0)] * num_pairs
    if plan.branch == "single":
        keeps_chosen_P, chosen_prob_P = draw_branches(
            plan,
            seed=seed,
            epoch=epoch,
            step=step,
            pair_ids=pair_ids,
            chosen_lengths=chosen_lengths,
            rejected_lengths=rejected_lengths,
        )
        kept = [
            ("chosen", float(prob)) if keeps_chosen else ("rejected", float(1.0 - prob))
            for keeps_chosen, prob in zip(keeps_chosen_P, chosen_prob_P, strict=True)
        ]
    draws = []
    for pair_id, num_chosen, num_rejected, (branch, prob) in zip(
        pair_ids, chosen_lengths, rejected_lengths, kept, strict=True
    ):
        chosen, rejected = _draw_responses(plan, seed, epoch, pair_id, (num_chosen, num_rejected))
        draws.append(PairDraw(chosen, rejected, branch, prob))
    return draws


def draw_response(
    plan: PruningPlan, length: int, *, prefix_uniform: float, position_uniforms: NDArray[np.float64]
) -> BranchDraw:
    """Prefix and positions of one response, as a function of its random numbers.

    Positions are drawn over the whole response and those behind the prefix are dropped, so position t is
    scored with probability q_t * P(K >= t) and weighs the inverse (METHOD.md M12).

    Args:
        plan: What is sampled and how.
        length: T, tokens of the whole response.
        prefix_uniform: One uniform in [0, 1).
        position_uniforms: At least `num_uniforms(...)` of them.
    """
    law = prefix_law(length, keep=plan.prefix_keep, sampler=plan.prefix_sampler, min_survival=plan.prefix_min_survival)
    prefix_tokens = law.quantile(prefix_uniform)
    positions, inclusion_prob = sample_positions(plan.position_sampler, length, plan.position_keep, position_uniforms)
    is_reached = positions < prefix_tokens
    positions, inclusion_prob = positions[is_reached], inclusion_prob[is_reached]
    if plan.prefix_weighting == "ipw":
        inclusion_prob = inclusion_prob * law.survival_probs[positions]
    return BranchDraw(prefix_tokens, positions, 1.0 / inclusion_prob)


def full_draw(chosen_length: int, rejected_length: int) -> PairDraw:
    """The draw that prunes nothing: every position of both responses, weight 1, both branches kept."""

    def whole(length: int) -> BranchDraw:
        return BranchDraw(length, np.arange(length, dtype=np.int64), np.ones(length))

    return PairDraw(whole(chosen_length), whole(rejected_length))


def _draw_responses(
    plan: PruningPlan, seed: int, epoch: int, pair_id: int, lengths: tuple[int, int]
) -> list[BranchDraw]:
    # Both responses read the same numbers: shared prefix and position draws lower the variance of the
    # margin (M11).
    prefix_uniform = float(uniform(seed, Purpose.PREFIX, epoch, pair_id)[0])
    count = max(num_uniforms(plan.position_sampler, length, plan.position_keep) for length in lengths)
    position_uniforms = uniform(seed, Purpose.POSITIONS, epoch, pair_id, count=count)
    return [
        draw_response(plan, length, prefix_uniform=prefix_uniform, position_uniforms=position_uniforms)
        for length in lengths
    ]
