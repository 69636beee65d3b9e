"""What is estimated: draws, their probabilities, the loss and the surrogate. No files, no processes.

Draw the pairs of a step with `draw_pairs`, score the drawn positions elsewhere, then

    loss_P, slope_P = preference_loss(margin_P, beta=..., loss_type=..., label_smoothing=...)
    coefficient_P2 = branch_coefficient(slope_P, draws)
    surrogate = pruned_surrogate(logp_K, weight_K, coefficient_K, num_pairs_global=...)

METHOD.md beside this file holds the numbered equations and says what is unbiased and what is not.
"""

from ds_stochdpo.pruning.branches import draw_branches
from ds_stochdpo.pruning.cost import AttentionCount, ModelShape, PairLengths, PairTokens, pair_cost
from ds_stochdpo.pruning.counter import count_flops
from ds_stochdpo.pruning.draws import BranchDraw, PairDraw, draw_pairs, draw_response, full_draw
from ds_stochdpo.pruning.objective import (
    branch_coefficient,
    jensen_gap_bound,
    preference_loss,
    pruned_surrogate,
)
from ds_stochdpo.pruning.positions import inclusion_probs, num_uniforms, sample_positions
from ds_stochdpo.pruning.prefixes import PrefixLaw, check_prefix_feasible, prefix_keep_range, prefix_law
from ds_stochdpo.pruning.rng import Purpose, permutation, uniform
from ds_stochdpo.pruning.work import StepWork, Variant, expected_step_work, ladder, step_work

__all__ = [
    "AttentionCount",
    "BranchDraw",
    "ModelShape",
    "PairDraw",
    "PairLengths",
    "PairTokens",
    "PrefixLaw",
    "Purpose",
    "StepWork",
    "Variant",
    "branch_coefficient",
    "check_prefix_feasible",
    "count_flops",
    "draw_branches",
    "draw_pairs",
    "draw_response",
    "expected_step_work",
    "full_draw",
    "inclusion_probs",
    "jensen_gap_bound",
    "ladder",
    "num_uniforms",
    "pair_cost",
    "permutation",
    "preference_loss",
    "prefix_keep_range",
    "prefix_law",
    "pruned_surrogate",
    "sample_positions",
    "step_work",
    "uniform",
]
