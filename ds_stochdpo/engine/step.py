"""From the log-probs of one micro-batch to its loss, its surrogate, the sums that are logged, and per-token scores.

Shape letters: P pairs, K scored rows. Entry: `micro_step`, `unpack_scores`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.packing import SLOTS, LaneLayout
from ds_stochdpo.pruning import branch_coefficient, preference_loss, pruned_surrogate
from ds_stochdpo.pruning.draws import PairDraw

PAIR_MEANS = (
    "loss",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)
"""Logged as means over the pairs of all ranks. Rewards are beta * log-ratio; log-probs are sums over tokens, in nats.

Under position or prefix pruning they are inverse-probability estimates from the sampled tokens.
"""
TOKEN_SUMS = ("tokens/executed", "tokens/scored", "tokens/backward")
"""Logged as sums over all ranks: a shared prompt counts once, dummies not at all."""


@dataclass(frozen=True, eq=False)
class MicroStep:
    """Outcome of one micro-batch.

    Attributes:
        surrogate: Scalar to back-propagate; its gradient is this micro-batch's share of the pruned gradient of the
            mean loss over `num_pairs_global` pairs. Its value is not the loss.
        sums: float64 [len(PAIR_MEANS) + len(TOKEN_SUMS)], sums over this micro-batch.
        is_finite_P: Whether loss and log-ratios of each pair are finite, bool [P].
    """

    surrogate: Tensor
    sums: Tensor
    is_finite_P: Tensor


def micro_step(
    layout: LaneLayout,
    draws: Sequence[PairDraw],
    live_logp_K: Tensor,
    frozen_logp_K: Tensor,
    config: StochDPOConfig,
    *,
    num_pairs_global: int,
) -> MicroStep:
    """Loss, surrogate and sums of one micro-batch.

    Args:
        layout: The micro-batch, on the device of the log-probs.
        draws: Draws of its pairs, in slot order.
        live_logp_K: Log-probs of `layout.live_rows`, with gradient.
        frozen_logp_K: Log-probs of `layout.detached_rows`, then `layout.frozen_rows`.
        config: Loss settings.
        num_pairs_global: Pairs of the whole optimizer step over all ranks.

    Returns:
        The outcome; a dummy gives zeros that still reach every parameter.
    """
    policy_P3, ref_P3 = slot_sums(layout, live_logp_K.detach(), frozen_logp_K)
    # The shared start belongs to both branches and cancels in the margin.
    logps_P2 = policy_P3[:, :2] + policy_P3[:, 2:]
    ratio_P2 = logps_P2 - ref_P3[:, :2] - ref_P3[:, 2:]
    margin_P = ratio_P2[:, 0] - ratio_P2[:, 1]
    loss_P, slope_P = preference_loss(
        margin_P, beta=config.beta, loss_type=config.loss_type, label_smoothing=config.label_smoothing
    )
    rows = layout.live_rows
    slot_coefficient = torch.zeros_like(policy_P3)
    slot_coefficient[:, :2] = branch_coefficient(slope_P, draws)
    surrogate = pruned_surrogate(
        live_logp_K,
        rows.weight_K,
        slot_coefficient.flatten()[rows.slot_K],
        num_pairs_global=num_pairs_global,
    )
    rewards_P2 = config.beta * ratio_P2
    pair_means = torch.stack(
        [
            loss_P.sum(),
            rewards_P2[:, 0].sum(),
            rewards_P2[:, 1].sum(),
            config.beta * margin_P.sum(),
            (margin_P > 0).to(margin_P).sum(),
            logps_P2[:, 0].sum(),
            logps_P2[:, 1].sum(),
        ]
    )
    counts = layout.counts
    tokens = torch.tensor([counts.executed, counts.scored, counts.backward]).to(pair_means)
    is_finite_P = torch.isfinite(ratio_P2).all(dim=1) & torch.isfinite(loss_P)
    return MicroStep(surrogate, torch.cat([pair_means, tokens]), is_finite_P)


def slot_sums(layout: LaneLayout, live_logp_K: Tensor, frozen_logp_K: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted log-probs of policy and reference, summed into the slots of each pair.

    Args:
        layout: The micro-batch.
        live_logp_K: Log-probs of `layout.live_rows`, without gradient.
        frozen_logp_K: Log-probs of `layout.detached_rows`, then `layout.frozen_rows`.

    Returns:
        Policy and reference sums, float64 [P, 3], columns as `SLOTS`. Both take the same rows and weights, so a
        reference equal to the policy gives equal sums whatever was sampled (METHOD.md M8).
    """
    groups = (layout.live_rows, layout.detached_rows, layout.frozen_rows)
    slot_K = torch.cat([g.slot_K for g in groups])
    weight_K = torch.cat([g.weight_K for g in groups])
    logp_K = torch.cat([live_logp_K, frozen_logp_K]).double()
    ref_K = torch.cat([g.ref_K for g in groups])
    size = (layout.num_pairs * len(SLOTS),)

    def summed(values_K: Tensor) -> Tensor:
        sums = torch.zeros(size, dtype=torch.float64, device=values_K.device)
        return sums.index_add_(0, slot_K, values_K * weight_K).view(-1, len(SLOTS))

    return summed(logp_K), summed(ref_K)


@dataclass(frozen=True, eq=False)
class PairScores:
    """Per-token log-probs of one pair under the current policy, nats, float32: [T_w] and [T_l]."""

    chosen_logps: np.ndarray
    rejected_logps: np.ndarray


def unpack_scores(layout: LaneLayout, logp_K: Tensor, scores: Sequence[PairScores]) -> None:
    """Put the log-probs of a micro-batch back where their tokens stand.

    Args:
        layout: The micro-batch.
        logp_K: Log-probs of its live, detached and frozen rows, in this order.
        scores: Records of its pairs, in slot order; filled in place. A shared start goes to both responses.
    """
    groups = (layout.live_rows, layout.detached_rows, layout.frozen_rows)
    slot_K = torch.cat([g.slot_K for g in groups]).cpu().numpy()
    position_K = torch.cat([g.position_K for g in groups]).cpu().numpy()
    values_K = logp_K.float().cpu().numpy()
    for index, record in enumerate(scores):
        for slot, name in enumerate(SLOTS):
            rows = slot_K == index * len(SLOTS) + slot
            if name != "rejected":
                record.chosen_logps[position_K[rows]] = values_K[rows]
            if name != "chosen":
                record.rejected_logps[position_K[rows]] = values_K[rows]
