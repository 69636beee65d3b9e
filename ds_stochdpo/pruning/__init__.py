"""What is estimated: draws, their probabilities, the loss and the surrogate. No files, no processes.

Draw the pairs of a step with `draw_pairs`, score the drawn positions elsewhere, then

    loss_P, slope_P = preference_loss(margin_P, beta=..., loss_type=..., label_smoothing=...)
    coefficient_P2 = branch_coefficient(slope_P, draws)
    surrogate = pruned_surrogate(logp_K, weight_K, coefficient_K, num_pairs_global=...)

METHOD.md beside this file holds the numbered equations and says what is unbiased and what is not.
"""

from ds_stochdpo.pruning.branches import draw_branches
from ds_stochdpo.pruning.cost import ModelShape, PairTokens, forward_flops, pair_cost
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

__all__ = [
    "BranchDraw",
    "ModelShape",
    "PairDraw",
    "PairTokens",
    "PrefixLaw",
    "Purpose",
    "branch_coefficient",
    "check_prefix_feasible",
    "draw_branches",
    "draw_pairs",
    "draw_response",
    "forward_flops",
    "full_draw",
    "inclusion_probs",
    "jensen_gap_bound",
    "num_uniforms",
    "pair_cost",
    "permutation",
    "preference_loss",
    "prefix_keep_range",
    "prefix_law",
    "pruned_surrogate",
    "sample_positions",
    "uniform",
]
