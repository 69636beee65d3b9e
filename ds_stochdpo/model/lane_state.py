"""What all two-lane modules of a model share: how layers run, and the frozen lane on its way. Entry: `LaneState`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ds_stochdpo.errors import ModelError
from ds_stochdpo.model.attention import Backend
from ds_stochdpo.model.offload import HostOffload
from ds_stochdpo.packing.lanes import LaneLayout


class LaneState:
    """The frozen lane on its way through one forward, shared by all two-lane modules of a model.

    Attributes:
        backend: Attention kernel.
        checkpoints_live: Recompute the layers of the live lane in the backward pass.
        offload: Where inputs of recomputed layers wait; None: where they are.
        mlp_tile_tokens: Tokens that meet a feed-forward block at once; None: all of a lane.
        layout: The micro-batch; set only during a forward.
        frozen_hidden: Hidden states of the frozen lane [1, T, D].
        frozen_rotary: Rotary embedding of the frozen lane's positions, keyed by layer type (None: all layers).
        frozen_rows_KD: Normed hidden states to score without gradient.
        counts_routing: Routers add to `routing_sums` what they choose.
        routing_sums: See `balance_loss`; outlives a forward, until it is taken.
    """

    def __init__(
        self,
        backend: Backend,
        checkpoints_live: bool,
        offload: HostOffload | None = None,
        mlp_tile_tokens: int | None = None,
    ) -> None:
        self.backend = backend
        self.checkpoints_live = checkpoints_live
        self.offload = offload
        self.mlp_tile_tokens = mlp_tile_tokens
        self._layout: LaneLayout | None = None
        self.counts_routing = False
        self.routing_sums: Tensor | None = None
        self.clear()

    def clear(self) -> None:
        """Forget the micro-batch and every tensor of it."""
        self._layout = None
        self.counts_routing = False
        self.frozen_hidden: Tensor | None = None
        self.frozen_rotary: dict[str | None, Any] = {}
        self.frozen_rows_KD: Tensor | None = None

    @property
    def layout(self) -> LaneLayout:
        """The micro-batch that is being run."""
        if self._layout is None:
            raise ModelError("two-lane modules run only inside TwoLaneModel.forward.")
        return self._layout

    @contextmanager
    def running(self, layout: LaneLayout) -> Iterator[None]:
        """Hold `layout` for the time of one forward."""
        self._layout = layout
        try:
            yield
        finally:
            self.clear()
