"""Feed-forward blocks a tile of tokens at a time, rebuilt in the backward pass.

No tensor of [tokens, ffn] larger than one tile exists in forward or backward. Shape letters: T tokens of one lane,
D hidden. Entry: `TwoLaneMLP`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ds_stochdpo.model.lane_state import LaneState

Block = Callable[[Tensor], Tensor]


class TwoLaneMLP:
    """Mixin: runs a block that works on each token alone in tiles of `LaneState.mlp_tile_tokens`."""

    lane_state: LaneState

    def forward(self, hidden: Tensor) -> Tensor:
        """Run the block on one lane's tokens.

        Args:
            hidden: [1, T, D].

        Returns:
            [1, T, D], as the block itself gives it.
        """
        tile = self.lane_state.mlp_tile_tokens
        block: Block = super().forward  # type: ignore[misc]
        # A short lane is one tile, not an exception: the two ways finish the gradients of these weights in different
        # orders, and ZeRO adds up whatever each rank put next into its bucket.
        if tile is None or (hidden.shape[1] <= tile and not torch.is_grad_enabled()):
            return block(hidden)
        parameters = [p for p in self.parameters() if p.requires_grad]  # type: ignore[attr-defined]
        grad_route = _SaveInput.apply(block, tile, hidden, *parameters)
        output = torch.empty_like(hidden)
        with torch.no_grad():
            # Detached, since a view made here still says that it wants a gradient, which misleads hooks of modules.
            for tokens in _tiles(hidden, tile):
                output[:, tokens] = block(hidden.detach()[:, tokens])
        attached: Tensor = _Attach.apply(grad_route, output)
        return attached


class _SaveInput(torch.autograd.Function):
    """Node of the whole block in the graph. Its output holds no values: it takes the gradient of the block's output.

    The input is saved before the block runs, so that a layer recomputed in the backward pass has all it needs by then
    and stops: tiles cost no more work than recomputing the layer does.
    """

    @staticmethod
    def forward(ctx: Any, block: Block, tile: int, hidden: Tensor, *parameters: Tensor) -> Tensor:
        ctx.block, ctx.tile, ctx.parameters = block, tile, parameters
        ctx.autocast = torch.is_autocast_enabled(hidden.device.type), torch.get_autocast_dtype(hidden.device.type)
        ctx.save_for_backward(hidden)
        return hidden.new_empty(()).expand(hidden.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        wants_hidden, *_ = wanted = ctx.needs_input_grad[2:]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        sums: list[Tensor | None] = [None] * len(ctx.parameters)
        is_on, dtype = ctx.autocast
        for tokens in _tiles(hidden, ctx.tile):
            part = hidden[:, tokens].detach().requires_grad_(wants_hidden)
            with torch.enable_grad(), torch.autocast(hidden.device.type, dtype=dtype, enabled=is_on):
                output = ctx.block(part)
            inputs = [part] * wants_hidden + list(ctx.parameters)
            # Experts that no token of a tile was given to have no gradient.
            own = list(torch.autograd.grad(output, inputs, grads[0][:, tokens], allow_unused=True))
            if grad_hidden is not None:
                grad_hidden[:, tokens] = own.pop(0)
            for i, grad in enumerate(own):
                sums[i] = _add(sums[i], grad)
        totals = [
            None if not wants else torch.zeros_like(p) if total is None else total.to(p.dtype)
            for wants, p, total in zip(wanted[1:], ctx.parameters, sums, strict=True)
        ]
        return None, None, grad_hidden, *totals


class _Attach(torch.autograd.Function):
    """The values of the second input with the gradient of the first."""

    @staticmethod
    def forward(ctx: Any, grad_route: Tensor, output: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _tiles(hidden: Tensor, tile: int) -> list[slice]:
    return [slice(i, i + tile) for i in range(0, hidden.shape[1], tile)]


def _add(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """Sum in at least fp32: in 16 bits it would depend on the number of tiles."""
    if grad is None:
        return total
    if total is None:
        return grad.to(torch.promote_types(grad.dtype, torch.float32))
    return total.add_(grad)
