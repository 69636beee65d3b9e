"""A run before it starts: its model without weights, its pairs, and the memory of one of its ranks.

Entry: `look_ahead`; `dry_run` and `estimate` print what it finds.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.data import PreferencePair, load_pairs, open_stream
from ds_stochdpo.data.rows import find_source
from ds_stochdpo.data.truncate import resolve_limits
from ds_stochdpo.engine import check_token_ids, resolve_settings
from ds_stochdpo.engine.outline import ModelOutline, model_outline
from ds_stochdpo.engine.settings import fill_model_sizes, zero_stage
from ds_stochdpo.errors import ConfigError, DataError
from ds_stochdpo.model import (
    ScoringOptions,
    StepMemory,
    TwoLaneModel,
    family_of,
    rehearsal_backend,
    rehearse_lanes,
    rehearse_stock,
)
from ds_stochdpo.model.rehearsal import Kernel
from ds_stochdpo.packing import pack_lanes
from ds_stochdpo.planning.forecast import MOST_STEPS, Forecast, MicroBatch, assumed_lengths, assumed_pairs, forecast
from ds_stochdpo.pruning import ModelShape, Variant
from ds_stochdpo.pruning.memory import Held, StatePlan, model_state

FEWEST_PAIRS = 64
"""Assumed pairs that are drawn at least, so that means over the draws settle."""
MOMENTS = {"adam": 2, "adamw": 2, "sgd": 0}
"""fp32 values of optimizer state a weight; optimizers that are not here are taken for Adam."""


@dataclass(frozen=True, eq=False)
class Outlook:
    """What is known before a run.

    Attributes:
        config: Settings with batch sizes resolved.
        outline: The model.
        shape: Its sizes.
        state: How its state is spread.
        pairs: Pairs to draw.
        num_pairs: Their number in the set, if that is known.
        told: Where they come from, for a reader.
    """

    config: StochDPOConfig
    outline: ModelOutline
    shape: ModelShape
    state: StatePlan
    pairs: list[PreferencePair]
    num_pairs: int | None
    told: str

    @property
    def kernel(self) -> Kernel:
        """Which attention kernel the run will have: 16-bit weights are taken for a GPU's."""
        return "flash" if self.config.bf16 and self.config.attn_implementation != "sdpa" else "sdpa"

    def forecast(self, variant: Variant | None = None) -> Forecast:
        """Work of the run, or of another way to run it; see `forecast`."""
        return forecast(
            self.pairs,
            self.config,
            self.shape,
            world_size=self.state.world_size,
            variant=variant,
            recomputes_all=self.state.zero_stage == 3,
        )

    def micro_batch_memory(self, micro: MicroBatch, variant: Variant) -> StepMemory:
        """Memory of one micro-batch, from a rehearsal of its step on the meta device."""
        if variant.layout == "padded":
            rows = [len(p.prompt_ids) + max(len(p.chosen_ids), len(p.rejected_ids)) for p in micro.pairs]
            return rehearse_stock(
                self._stock,
                rows=2 * len(rows),
                length=max(rows),
                checkpointing=variant.gradient_checkpointing,
                kernel=self.kernel,
                scored=None if variant.head == "full" else round(micro.work.tokens_scored),
                scoring=self._scoring,
            )
        model = self._two_lane
        model.lane_state.checkpoints_live = variant.gradient_checkpointing
        layout = pack_lanes(
            micro.pairs,
            micro.draws,
            share_prompt=variant.layout == "shared",
            share_response_start=variant.share_response_start,
        )
        memory = rehearse_lanes(model, layout)
        if not (self.config.activation_offload and variant.gradient_checkpointing):
            return memory
        # On a device without memory nothing moves; in training all layers' inputs do, but for those of two layers.
        away = max(0, self.shape.layers - 2) * self.shape.hidden * self.state.weight_bytes
        return dataclasses.replace(memory, kept=memory.kept - away * layout.counts.backward)

    def held(self, memory: StepMemory, *, world_size: int | None = None) -> dict[str, Held]:
        """Bytes of one rank by kind: the model's state, then what one micro-batch adds.

        Args:
            memory: Of the largest micro-batch.
            world_size: Ranks; None: those of the run.
        """
        state = self.state if world_size is None else dataclasses.replace(self.state, world_size=world_size)
        num_weights = self.outline.num_weights
        kinds = model_state(num_weights, state)
        if self.config.reference == "online":
            # Always sharded, whatever the policy's stage; taken to be as large as the policy.
            share = -(-num_weights // state.world_size) * state.weight_bytes
            kinds["weights of the reference"] = Held(host=share) if state.weights_on_host else Held(share)
        kinds["activations kept for the backward pass"] = Held(memory.kept)
        kinds["beside them: head, or a layer at work"] = Held(max(memory.head, memory.layers))
        return kinds

    def peak(self, memory: StepMemory, *, world_size: int | None = None) -> Held:
        """The most one rank holds, on its device and on its host: in the backward pass or in the optimizer step."""
        kinds = self.held(memory, world_size=world_size).values()
        backward = sum(held.device for held in kinds if not held.in_step)
        in_step = sum(held.device for held in kinds) - memory.peak
        return Held(max(backward, in_step), sum(held.host for held in kinds))

    @cached_property
    def _stock(self) -> Any:
        return self._on_meta(self.outline.rebuilt())

    @cached_property
    def _two_lane(self) -> TwoLaneModel:
        return TwoLaneModel(
            self._on_meta(self.outline.rebuilt()),
            rehearsal_backend(self.kernel),
            self._scoring,
            mlp_tile_tokens=self.config.mlp_tile_tokens,
        )

    @property
    def _scoring(self) -> ScoringOptions:
        return ScoringOptions(self.config.score_chunk_rows, self.config.score_recompute)

    def _on_meta(self, lm: Any) -> Any:
        return lm.to(torch.bfloat16 if self.config.bf16 else torch.float32)


def look_ahead(config: StochDPOConfig, lengths: tuple[int, int, int] | None = None) -> Outlook:
    """Read a run's settings, model config and pairs without reaching the network.

    Pairs are read where file and tokenizer are on disk; else each is assumed to fill `max_length`.

    Args:
        config: The settings; `dry_run_ranks` says for how many ranks.
        lengths: Tokens of prompt, chosen and rejected response to assume of every pair; None: read the pairs.

    Returns:
        What is known.

    Raises:
        StochDPOError: If training would refuse the settings, the model or the pairs.
    """
    world_size = config.dry_run_ranks or int(os.environ.get("WORLD_SIZE", "1"))
    resolved, ds = resolve_settings(config, config.deepspeed, world_size=world_size)
    outline = model_outline(config.model_name_or_path, config.dry_run_model_config)
    shape = family_of(outline.lm).shape(outline.lm.config)
    ds = fill_model_sizes(ds, shape.hidden)
    if lengths is None:
        pairs, num_pairs, told = _pairs(resolved, outline, world_size)
    else:
        pairs, num_pairs = assumed_pairs(*lengths, _count(resolved, world_size)), None
        told = f"every pair assumed to have {lengths[0]} + {lengths[1]} + {lengths[2]} tokens"
    return Outlook(resolved, outline, shape, _state_plan(resolved, ds, world_size), pairs, num_pairs, told)


def _pairs(
    config: StochDPOConfig, outline: ModelOutline, world_size: int
) -> tuple[list[PreferencePair], int | None, str]:
    """Pairs to draw, their number in the set if that is known, and where they come from."""
    context = getattr(outline.lm.config, "max_position_embeddings", None)
    limits = resolve_limits(config, context, None)
    missing = _missing_files(config)
    if missing is None and outline.tokenizer is not None:
        if config.streaming:
            stream = open_stream(config, outline.tokenizer, context_length=context)
            pairs = list(itertools.islice(stream.read(0), MOST_STEPS * _pairs_per_step(config, world_size)))
            num_pairs, told = None, f"the first {len(pairs)} pairs of {config.dataset_name}, a stream"
        else:
            pairs = load_pairs(config, outline.tokenizer, context_length=context).pairs
            num_pairs, told = len(pairs), f"{len(pairs)} pairs of {config.dataset_name}"
        if config.dataset_test_split is not None:
            load_pairs(config, outline.tokenizer, split="test", context_length=context)
        largest = max(int(max(p.prompt_ids.max(), p.chosen_ids.max(), p.rejected_ids.max())) for p in pairs)
        check_token_ids(largest, outline.lm, len(outline.tokenizer))
        return pairs, num_pairs, told
    if limits.max_length is None:
        raise ConfigError("max_length is not set and the model names no context; set it, for a plan needs a length.")
    prompt, response = assumed_lengths(config, limits.max_length)
    pairs = assumed_pairs(prompt, response, response, _count(config, world_size))
    why = missing or f"no tokenizer on disk for {config.dataset_name}"
    return pairs, None, f"{why}: every pair assumed to have {prompt} + {response} + {response} tokens (max_length)"


def _count(config: StochDPOConfig, world_size: int) -> int:
    """Assumed pairs: whole optimizer steps."""
    pairs_per_step = _pairs_per_step(config, world_size)
    return pairs_per_step * -(-FEWEST_PAIRS // pairs_per_step)


def _pairs_per_step(config: StochDPOConfig, world_size: int) -> int:
    assert config.per_device_train_batch_size is not None
    assert config.gradient_accumulation_steps is not None
    return world_size * config.per_device_train_batch_size * config.gradient_accumulation_steps


def _missing_files(config: StochDPOConfig) -> str | None:
    """Why the pairs cannot be read without the network; None: they can."""
    for split in ("train", "test") if config.dataset_test_split is not None else ("train",):
        try:
            source = find_source(config, split)
        except DataError as error:
            # A path may well exist only where the run will be.
            return str(error).rstrip(".")
        if not source.files and not Path(source.name).expanduser().is_dir():
            return f"{source.name} is a hub name, not read"
    return None


def _state_plan(config: StochDPOConfig, ds: dict[str, Any], world_size: int) -> StatePlan:
    zero = ds.get("zero_optimization", {})
    optimizer = ds["optimizer"]

    def is_offloaded(section: str) -> bool:
        return (zero.get(section) or {}).get("device", "none") != "none"

    moments = MOMENTS.get(str(optimizer["type"]).lower(), 2)
    return StatePlan(
        zero_stage=zero_stage(ds),
        world_size=world_size,
        weight_bytes=2 if config.bf16 else 4,
        optimizer_on_host=is_offloaded("offload_optimizer"),
        weights_on_host=is_offloaded("offload_param"),
        moments=moments or int(bool(optimizer.get("params", {}).get("momentum"))),
        sub_group=int(zero.get("sub_group_size", 10**9)),
        max_live=int(zero.get("stage3_max_live_parameters", 10**9)),
    )
