"""Mixture-of-experts layers in two lanes: the router's balance as a metric, and experts that hold no gathered weights.

Entry: `TwoLaneRouter`, `TwoLaneExperts`, `balance_loss`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from ds_stochdpo.model.lane_state import LaneState


def balance_loss(sums: Tensor) -> float:
    """Load-balancing loss of the routers, as transformers computes it, from sums that may come from many batches.

    Args:
        sums: [2 E + 1]: times each of the E experts was chosen, sum of its probabilities, and rows; over all tokens
            and sparse layers.

    Returns:
        E times the sum over experts of their shares of tokens and of probability; its least value is the number of
        experts a token is given to. nan if nothing was counted.

    Source: arXiv:2101.03961, equations 4 to 6.
    """
    num_experts = len(sums) // 2
    rows = float(sums[-1])
    if rows == 0:
        return float("nan")
    shares = sums[:-1].view(2, num_experts) / rows
    return num_experts * float(shares.prod(0).sum())


class TwoLaneRouter:
    """Mixin: adds what the live lane's tokens were given to up for `balance_loss`; changes no score."""

    lane_state: LaneState

    def forward(self, hidden: Tensor) -> Any:
        """Route, and count while a training forward of the live lane runs for the first time."""
        logits, weights, chosen = super().forward(hidden)  # type: ignore[misc]
        if self.lane_state.counts_routing:
            probs = torch.softmax(logits.detach().to(torch.float64), dim=-1)
            num_experts = probs.shape[-1]
            counts = torch.zeros_like(probs[0]).scatter_add_(0, chosen.flatten(), probs.new_ones(chosen.numel()))
            sums = torch.cat([counts, probs.sum(0), probs.new_tensor([len(probs)])])
            known = self.lane_state.routing_sums
            assert len(sums) == 2 * num_experts + 1
            self.lane_state.routing_sums = sums if known is None else known + sums
        return logits, weights, chosen


class TwoLaneExperts:
    """Mixin: the graph of the experts refers to their weights instead of holding views of them.

    transformers 5.24 multiplies by transposed or sliced views of the stacked expert weights, and autograd keeps a view
    alive with all its storage: under ZeRO-3 every expert would stay gathered until its backward pass. Recomputed layers
    keep no graph, and hooks inside a checkpoint would defeat it.
    """

    lane_state: LaneState

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the experts on tokens of one lane."""
        if self.lane_state.checkpoints_live or not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        parameters = list(self.parameters(recurse=False))  # type: ignore[attr-defined]
        with torch.autograd.graph.saved_tensors_hooks(_refer_to(parameters), _look_up):
            return super().forward(*args, **kwargs)  # type: ignore[misc]


def _refer_to(parameters: list[nn.Parameter]) -> Callable[[Tensor], Any]:
    """Pack hook: a view of a parameter becomes the parameter and where the view lies in it."""

    def pack(saved: Tensor) -> Any:
        for parameter in parameters:
            data = parameter.data
            start = saved.storage_offset() - data.storage_offset()
            same_storage = saved.untyped_storage().data_ptr() == data.untyped_storage().data_ptr()
            if same_storage and saved.dtype == data.dtype and 0 <= start < data.numel():
                return parameter, saved.shape, saved.stride(), start
        return saved

    return pack


def _look_up(packed: Any) -> Tensor:
    """Unpack hook: the view in the parameter's storage of now, gathered anew by the layer's backward hook."""
    if isinstance(packed, Tensor):
        return packed
    parameter, shape, stride, start = packed
    data = parameter.data
    return data.as_strided(shape, stride, data.storage_offset() + start)
