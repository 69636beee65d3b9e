"""A Hugging Face causal LM in its two-lane form: every parameterised module runs once for both lanes.

The live lane passes through the model's own forward; the frozen lane rides beside it in a `LaneState`. Modules change
their class, not their place, so parameter names stay those of the model. Entry: `TwoLaneModel`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ds_stochdpo.data.pair import PreferencePair
from ds_stochdpo.errors import ModelError
from ds_stochdpo.model.attention import ATTENTION_NAME, Backend, LaneCall
from ds_stochdpo.model.experts import TwoLaneExperts, TwoLaneRouter, balance_loss
from ds_stochdpo.model.families import Family, family_of, rotary_limit
from ds_stochdpo.model.lane_state import LaneState
from ds_stochdpo.model.mlp import TwoLaneMLP
from ds_stochdpo.model.offload import HostOffload
from ds_stochdpo.model.scoring import ScoringHead, ScoringOptions
from ds_stochdpo.packing.lanes import LaneLayout


class TwoLaneEmbedding:
    """Mixin: looks up both lanes; the frozen one without gradient."""

    lane_state: LaneState
    reads_positions: bool
    frozen_scale: float

    def forward(self, live: Tensor) -> Tensor:
        """Embed the live lane's ids or positions, and the frozen lane's beside it.

        `frozen_scale` is what the model's own forward does to the live lane's embedding after this call.
        """
        state = self.lane_state
        lane = state.layout.frozen
        with torch.no_grad():
            frozen = super().forward((lane.positions_T if self.reads_positions else lane.ids_T)[None])  # type: ignore[misc]
            if self.frozen_scale != 1.0:
                frozen = frozen * self.frozen_scale
        state.frozen_hidden = frozen if state.frozen_hidden is None else state.frozen_hidden + frozen
        return super().forward(live)  # type: ignore[misc]


class TwoLaneRotary:
    """Mixin: rotary embedding for each lane's own positions."""

    lane_state: LaneState

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """Rotary embedding of the live lane; the frozen lane's is kept in the state."""
        state = self.lane_state
        own = {} if layer_type is None else {"layer_type": layer_type}
        positions_T = state.layout.frozen.positions_T
        # Length-dependent frequencies take a maximum, which an empty lane has not.
        if len(positions_T):
            state.frozen_rotary[layer_type] = super().forward(x, positions_T[None], **own)  # type: ignore[misc]
        return super().forward(x, position_ids, **own)  # type: ignore[misc]


class TwoLaneLayer:
    """Mixin: one decoder layer for both lanes inside one module call.

    Under ZeRO-3 the class is a leaf module, so one all-gather serves both lanes whatever a rank drew.
    """

    lane_state: LaneState
    rotary_type: str | None

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the live lane, then the frozen lane against the prompt keys the live lane left."""
        state = self.lane_state
        layout = state.layout
        layer = super().forward  # type: ignore[misc]
        call = LaneCall(layout.live.segments, state.backend)
        if len(layout.prompt_rows_C):
            call.capture_rows_C = layout.prompt_rows_C

        is_training = torch.is_grad_enabled() and layout.num_pairs > 0

        def run_live(live_hidden: Tensor) -> Tensor:
            state.counts_routing = is_training and call.is_open
            output = layer(live_hidden, *args, lane=call, **kwargs)
            state.counts_routing = False
            return output

        if state.checkpoints_live and torch.is_grad_enabled():
            # Nothing random is drawn inside a layer, so the RNG state need not be kept for the recomputation.
            with state.offload.saving(hidden) if state.offload else nullcontext():
                output = checkpoint(run_live, hidden, use_reentrant=False, preserve_rng_state=False)
        else:
            output = run_live(hidden)
        call.is_open = False
        self._run_frozen(layer, call, args, kwargs)
        call.prompt_keys = call.prompt_values = None
        return output

    def _run_frozen(self, layer: Any, live_call: LaneCall, args: Any, kwargs: dict[str, Any]) -> None:
        state = self.lane_state
        lane = state.layout.frozen
        if not len(lane.ids_T):
            return
        call = LaneCall(lane.segments, state.backend, None, live_call.prompt_keys, live_call.prompt_values)
        rotary = state.frozen_rotary.get(self.rotary_type)
        own = {"position_ids": lane.positions_T[None], "position_embeddings": rotary}
        with torch.no_grad():
            frozen_kwargs = {**kwargs, **{k: v for k, v in own.items() if k in kwargs}}
            state.frozen_hidden = layer(state.frozen_hidden, *args, lane=call, **frozen_kwargs)


class TwoLaneNorm:
    """Mixin: final norm of the rows that are scored, and of no others."""

    lane_state: LaneState
    keeps_rows: bool

    def forward(self, hidden: Tensor) -> Tensor:
        """Norm the live rows to score; the frozen ones are kept in the state.

        A model whose forward reshapes the norm's output to the input's length (`keeps_rows`) gets every live row back.
        """
        state = self.lane_state
        layout = state.layout
        assert state.frozen_hidden is not None
        with torch.no_grad():
            frozen = torch.cat(
                [hidden[0].detach()[layout.detached_rows.row_K], state.frozen_hidden[0, layout.frozen_rows.row_K]]
            )
            state.frozen_rows_KD = super().forward(frozen[None])[0]  # type: ignore[misc]
        live = hidden if self.keeps_rows else hidden[:, layout.live_rows.row_K]
        return super().forward(live)  # type: ignore[misc]


@functools.cache
def two_lane_class(mixin: type, base: Any) -> type:
    """`base` with the two-lane forward of `mixin`; the same class for the same pair, so it can be marked as a leaf."""
    return type(f"TwoLane{base.__name__}", (mixin, base), {"__module__": base.__module__})


class TwoLaneModel(nn.Module):
    """What the engine wraps: one forward scores the sampled tokens of one micro-batch."""

    def __init__(
        self,
        lm: PreTrainedModel,
        backend: Backend,
        scoring: ScoringOptions | None = None,
        *,
        gradient_checkpointing: bool = False,
        activation_offload: bool = False,
        mlp_tile_tokens: int | None = None,
    ) -> None:
        """Turn `lm` into its two-lane form in place.

        Args:
            lm: Causal LM of a supported family; it cannot generate afterwards (export it and load the export).
            backend: Attention kernel from `choose_backend`.
            scoring: How rows meet the head; soft cap and scale are taken from the model's config.
            gradient_checkpointing: Recompute the live lane's layers in the backward pass.
            activation_offload: Keep the inputs of these layers in host memory until then; on the CPU, nothing changes.
            mlp_tile_tokens: Tokens of a lane that meet a feed-forward block at once; None: all.

        Raises:
            ModelError: If the model's family or settings cannot be run in two lanes.
        """
        super().__init__()
        self.family = family_of(lm)
        offload = HostOffload() if activation_offload else None
        self.lane_state = LaneState(backend, gradient_checkpointing, offload, mlp_tile_tokens)
        self.layer_class = _convert(lm, self.family, self.lane_state, scoring or ScoringOptions())
        self.lm = lm

    def check_lengths(self, pairs: Sequence[PreferencePair]) -> None:
        """Refuse pairs that the model by itself would give other rotary frequencies than the packed lanes do.

        Whole responses count, though a draw may run less of them: the model's own forward sees them whole.

        Args:
            pairs: Pairs about to be packed.

        Raises:
            ModelError: If a pair is longer than the rotary embedding's original context and its frequencies depend on
                the length beyond it.
        """
        limit = rotary_limit(self.lm.config)
        if limit is None:
            return
        num_tokens, kind = limit
        for pair in pairs:
            longest = len(pair.prompt_ids) + max(len(pair.chosen_ids), len(pair.rejected_ids))
            if longest > num_tokens:
                raise ModelError(
                    f"pair {pair.pair_id} has {longest} tokens; beyond {num_tokens} rope_type {kind} picks its "
                    f"frequencies by the longest row, so packing would change scores: set max_length to {num_tokens} "
                    "or less."
                )

    def routing_metrics(self, sum_over_ranks: Callable[[Tensor], Tensor], device: torch.device) -> dict[str, float]:
        """Balance of the routers over the live lanes' tokens since the last call, as transformers computes it.

        Args:
            sum_over_ranks: Adds up a tensor; a collective, so every rank calls this alike.
            device: Where that tensor is if this rank counted nothing.

        Returns:
            router/aux_loss; nothing for dense models.
        """
        if not self.family.router:
            return {}
        sums, self.lane_state.routing_sums = self.lane_state.routing_sums, None
        if sums is None:
            sums = torch.zeros(2 * self.lm.config.num_experts + 1, dtype=torch.float64, device=device)
        return {"router/aux_loss": balance_loss(sum_over_ranks(sums))}

    def forward(self, layout: LaneLayout) -> tuple[Tensor, Tensor]:
        """Score the sampled tokens of both lanes.

        Args:
            layout: The micro-batch, on the model's device.

        Returns:
            Log-probs in nats, fp32: of `layout.live_rows`, with gradient; and without gradient of
            `layout.detached_rows` followed by `layout.frozen_rows`.
        """
        live = layout.live
        with self.lane_state.running(layout):
            hidden = self.lm.base_model(
                input_ids=live.ids_T[None], position_ids=live.positions_T[None], use_cache=False
            ).last_hidden_state[0]
            live_KD = hidden[layout.live_rows.row_K] if self.family.norm_keeps_rows else hidden
            frozen_targets = torch.cat([layout.detached_rows.target_K, layout.frozen_rows.target_K])
            return self.lm.get_output_embeddings()(
                live_KD, layout.live_rows.target_K, self.lane_state.frozen_rows_KD, frozen_targets
            )


def _convert(lm: PreTrainedModel, family: Family, state: LaneState, scoring: ScoringOptions) -> type:
    """Set the two-lane classes; returns the class of the decoder layers."""
    _own_config(lm)
    base = lm.base_model
    if lm.is_activation_checkpointing:
        lm.activation_checkpointing_disable()
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            # Policy and reference must be comparable; the config keeps the model's own rate for the export.
            module.p = 0.0
        elif isinstance(getattr(module, "jitter_noise", None), float):
            # Mixtral's router draws noise in training mode.
            module.jitter_noise = 0.0  # type: ignore[assignment]
    for path, reads_positions in family.embeddings:
        embedding = _swap(base.get_submodule(path), TwoLaneEmbedding, state)
        embedding.reads_positions = reads_positions
        embedding.frozen_scale = family.embedding_scale(lm.config)
    if family.rotary:
        _swap(base.get_submodule(family.rotary), TwoLaneRotary, state)
    layers = [_swap(layer, TwoLaneLayer, state) for layer in base.get_submodule(family.layers).children()]
    for layer, layer_type in zip(layers, _layer_types(lm, family), strict=True):
        layer.rotary_type = layer_type
        for path, mixin in ((family.mlp, TwoLaneMLP), (family.router, TwoLaneRouter), (family.experts, TwoLaneExperts)):
            part = dict(layer.named_modules()).get(path) if path else None
            if part is not None:
                _swap(part, mixin, state)
    _swap(base.get_submodule(family.norm), TwoLaneNorm, state).keeps_rows = family.norm_keeps_rows
    head = lm.get_output_embeddings()
    head.__class__ = ScoringHead
    head.scoring = family.scoring(lm.config, scoring)
    return type(layers[0])


def _layer_types(lm: PreTrainedModel, family: Family) -> list[str | None]:
    """Which rotary embedding each layer takes; None where all take the same."""
    num_layers = lm.config.num_hidden_layers
    return list(lm.config.layer_types[:num_layers]) if family.rotary_by_layer_type else [None] * num_layers


def _swap(module: nn.Module, mixin: type, state: LaneState) -> Any:
    base: Any = type(module)
    module.__class__ = two_lane_class(mixin, base)
    module.lane_state = state  # type: ignore[assignment]
    return module


def _own_config(lm: PreTrainedModel) -> None:
    """Give the model a config of its own: others may share the object, and the attention name must not reach them."""
    shared = lm.config
    own = copy.deepcopy(shared)
    own._attn_implementation = ATTENTION_NAME
    for module in lm.modules():
        if getattr(module, "config", None) is shared:
            setattr(module, "config", own)  # noqa: B010 - typed as a Tensor or Module
