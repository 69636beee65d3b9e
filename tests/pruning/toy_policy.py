"""A policy small enough to differentiate for each outcome: three parameters, four candidate tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ds_stochdpo.pruning import BranchDraw, PairDraw, branch_coefficient, preference_loss, pruned_surrogate

BETA = 0.7
REFERENCE = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64)
POLICY = torch.tensor([0.9, 0.4, -0.6], dtype=torch.float64)


@dataclass(frozen=True)
class ToyPair:
    """Features of each position's four candidate tokens, the first one being the response's; [L, 4, 3]."""

    chosen: Tensor
    rejected: Tensor


def make_pairs(lengths: list[tuple[int, int]], seed: int = 0) -> list[ToyPair]:
    generator = torch.Generator().manual_seed(seed)
    return [
        ToyPair(*(torch.randn(n, 4, 3, generator=generator, dtype=torch.float64) for n in pair)) for pair in lengths
    ]


def token_logps(theta: Tensor, features: Tensor) -> Tensor:
    return torch.log_softmax(features @ theta, dim=-1)[:, 0]


def log_ratio(theta: Tensor, features: Tensor, draw: BranchDraw) -> Tensor:
    positions = torch.from_numpy(draw.positions)
    ratio = (token_logps(theta, features) - token_logps(REFERENCE, features))[positions]
    return (torch.from_numpy(draw.weights) * ratio).sum()


def margins(theta: Tensor, pairs: list[ToyPair], draws: list[PairDraw]) -> Tensor:
    both = zip(pairs, draws, strict=True)
    return torch.stack(
        [log_ratio(theta, p.chosen, d.chosen) - log_ratio(theta, p.rejected, d.rejected) for p, d in both]
    )


def sampled_loss(theta: Tensor, pairs: list[ToyPair], draws: list[PairDraw], loss: tuple[str, float]) -> Tensor:
    """Mean loss at the sampled margins, the quantity whose gradient branch pruning estimates."""
    margin_P = margins(theta, pairs, draws)
    return preference_loss(margin_P, beta=BETA, loss_type=loss[0], label_smoothing=loss[1])[0].mean()


def gradient(function, theta: Tensor) -> Tensor:
    theta = theta.clone().requires_grad_()
    return torch.autograd.grad(function(theta), theta)[0]


def pruned_gradient(
    theta: Tensor,
    pairs: list[ToyPair],
    draws: list[PairDraw],
    loss: tuple[str, float] = ("sigmoid", 0.0),
    *,
    mistake: str = "",
) -> Tensor:
    """Gradient of the surrogate, as the engine forms it; `mistake` names a way to get it wrong."""
    margin_P = margins(theta, pairs, draws)
    _, slope_P = preference_loss(margin_P, beta=BETA, loss_type=loss[0], label_smoothing=loss[1])
    if mistake == "branch probability left out":
        draws = [replace(draw, kept_prob=1.0) for draw in draws]
    if mistake == "branch probabilities swapped":
        draws = [replace(draw, kept_prob=1.0 - draw.kept_prob) for draw in draws]
    coefficient_P2 = branch_coefficient(slope_P, draws)
    theta = theta.clone().requires_grad_()
    logp, weight, coefficient = [], [], []
    for i, (pair, draw) in enumerate(zip(pairs, draws, strict=True)):
        sides = ((pair.chosen, draw.chosen), (pair.rejected, draw.rejected))
        for b, (features, branch) in enumerate(sides):
            logp.append(token_logps(theta, features)[torch.from_numpy(branch.positions)])
            weights = torch.from_numpy(branch.weights)
            weight.append(torch.ones_like(weights) if mistake == "position weight left out" else weights)
            coefficient.append(coefficient_P2[i, b].expand(len(weights)))
    num_pairs = len(pairs)
    if mistake == "divided by the kept chosen branches":
        num_pairs = max(1, sum(draw.kept == "chosen" for draw in draws))
    surrogate = pruned_surrogate(torch.cat(logp), torch.cat(weight), torch.cat(coefficient), num_pairs_global=num_pairs)
    return torch.autograd.grad(surrogate, theta)[0]
