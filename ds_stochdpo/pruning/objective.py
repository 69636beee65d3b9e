"""The preference loss, its slope, and the scalar back-propagated instead of it (METHOD.md sections 1, 3, 4).

Shape suffixes: P pairs, K scored positions of all back-propagated branches together.
Entries: `preference_loss`, `branch_coefficient`, `pruned_surrogate`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ds_stochdpo.config import LOSS_TYPES
from ds_stochdpo.errors import ConfigError
from ds_stochdpo.pruning.draws import PairDraw


def preference_loss(margin_P: Tensor, *, beta: float, loss_type: str, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """Loss of each pair and its slope in the margin.

    With sampled positions or prefixes in the margin, neither is an unbiased estimate of its value at the
    full margin: the loss is too high on average (METHOD.md M13), the slope is off by a term of the order of
    the margin's variance.

    Args:
        margin_P: delta_w - delta_l, chosen minus rejected log-ratio summed over tokens, nats.
        beta: Strength; the loss is a function of beta * margin.
        loss_type: sigmoid, robust or hinge (M2).
        label_smoothing: Assumed share of flipped preferences; 0 for hinge, below 0.5 for robust.

    Returns:
        loss_P: Differentiable in `margin_P`; float32, or float64 if the margin is.
        slope_P: d loss / d margin, detached, same dtype (M3). The chosen log-prob has coefficient +slope,
            the rejected one -slope. Negative for sigmoid without smoothing, robust, and hinge below its
            corner.

    Raises:
        ConfigError: If the loss is unknown, or has no such label_smoothing.

    Source: sigmoid arXiv:2305.18290, robust arXiv:2403.00409, hinge arXiv:2305.10425; slopes METHOD.md M3.
    """
    _check_loss(loss_type, label_smoothing)
    margin_P = margin_P.to(torch.promote_types(margin_P.dtype, torch.float32))
    reward_margin_P = beta * margin_P
    detached_P = reward_margin_P.detach()
    if loss_type == "hinge":
        slope_P = -beta * (detached_P < 1.0).to(margin_P.dtype)
        return torch.relu(1.0 - reward_margin_P), slope_P
    kept, flipped = 1.0 - label_smoothing, label_smoothing
    if loss_type == "robust":
        flipped, scale = -label_smoothing, 1.0 / (1.0 - 2.0 * label_smoothing)
        kept, flipped = kept * scale, flipped * scale
    loss_P = -kept * logsigmoid(reward_margin_P) - flipped * logsigmoid(-reward_margin_P)
    slope_P = beta * (flipped * torch.sigmoid(detached_P) - kept * torch.sigmoid(-detached_P))
    return loss_P, slope_P


def branch_coefficient(slope_P: Tensor, draws: Sequence[PairDraw]) -> Tensor:
    """Factor of each branch's log-prob in the surrogate.

    Args:
        slope_P: d loss / d margin of each pair.
        draws: The pairs' draws, in the same order.

    Returns:
        [P, 2], detached, columns chosen and rejected: +slope and -slope over the probability of the kept
        branch, 0 for a dropped one (METHOD.md M14). The expectation over the branch draw is (+slope,
        -slope).

    Raises:
        ValueError: If there is not one draw a pair.
    """
    if slope_P.shape != (len(draws),):
        raise ValueError(f"slope_P has shape {tuple(slope_P.shape)} but there are {len(draws)} draws; give one a pair.")
    signs = [
        (
            (draw.kept != "rejected") / draw.kept_prob,
            -(draw.kept != "chosen") / draw.kept_prob,
        )
        for draw in draws
    ]
    sign_P2 = torch.tensor(signs, dtype=slope_P.dtype, device=slope_P.device).reshape(-1, 2)
    return slope_P.detach().unsqueeze(1) * sign_P2


def pruned_surrogate(logp_K: Tensor, weight_K: Tensor, coefficient_K: Tensor, *, num_pairs_global: int) -> Tensor:
    """Scalar whose gradient is the pruned gradient: sum of coefficient * weight * log-prob, a pair.

    Its value is not the loss. Given the positions and prefixes, its gradient averaged over the branch draw
    is the gradient of the sampled loss (METHOD.md M15); averaged over everything it is the gradient of the
    expected sampled loss F, not of the loss at the full margin (M13). Nothing is claimed after clipping or
    inside Adam.

    Args:
        logp_K: Policy log-prob of each scored position of the back-propagated branches, nats; carries
            gradient.
        weight_K: Inverse probability of each position, `BranchDraw.weights`.
        coefficient_K: `branch_coefficient` of the pair and branch a position belongs to.
        num_pairs_global: Pairs of the whole optimizer step over all ranks, not those of this rank, nor the
            kept branches.

    Returns:
        Scalar, float32 or float64. With no position it is 0 and still reaches `logp_K`.

    Raises:
        ValueError: If the three inputs differ in shape or there is no pair.
    """
    if not logp_K.shape == weight_K.shape == coefficient_K.shape:
        raise ValueError(
            f"logp_K, weight_K and coefficient_K have shapes {tuple(logp_K.shape)}, {tuple(weight_K.shape)}, "
            f"{tuple(coefficient_K.shape)}; give one of each for every scored position."
        )
    if num_pairs_global < 1:
        raise ValueError(f"num_pairs_global is {num_pairs_global}; an optimizer step has at least one pair.")
    logp_K = logp_K.to(torch.promote_types(logp_K.dtype, torch.float32))
    factor_K = (coefficient_K * weight_K).detach().to(logp_K)
    return (factor_K * logp_K).sum() / num_pairs_global


def jensen_gap_bound(beta: float, var_margin: float) -> float:
    """Upper bound of E[loss(sampled margin)] - loss(margin), sigmoid, smoothed and robust (METHOD.md M13).

    Holds when the sampled margin is unbiased. It does not hold for hinge, whose gap is only below
    beta * sqrt(var_margin) / 2.

    Args:
        beta: Strength of the loss.
        var_margin: Variance of the sampled margin, nats squared.

    Example:
        >>> jensen_gap_bound(2.0, 0.5)
        0.25
    """
    return beta * beta * var_margin / 8.0


def _check_loss(loss_type: str, label_smoothing: float) -> None:
    if loss_type not in LOSS_TYPES:
        raise ConfigError(f"loss_type is {loss_type!r}; allowed: {', '.join(LOSS_TYPES)}.")
    allowed = {
        "sigmoid": (0.0 <= label_smoothing <= 0.5, "in [0, 0.5]"),
        "robust": (0.0 <= label_smoothing < 0.5, "in [0, 0.5), for it divides by 1 - 2 * label_smoothing"),
        "hinge": (label_smoothing == 0.0, "0"),
    }
    is_allowed, text = allowed[loss_type]
    if not is_allowed:
        raise ConfigError(f"label_smoothing is {label_smoothing}; loss_type {loss_type} takes {text}.")
