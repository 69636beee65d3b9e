"""From a causal LM and settings to a training engine. Entry: `initialize`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed as ds_library
import torch
from torch import nn
from transformers import PreTrainedModel

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.engine.compiled_ops import guarded_builds
from ds_stochdpo.engine.distributed import Ranks, start_process_group
from ds_stochdpo.engine.engine import StochDPOEngine
from ds_stochdpo.engine.frozen import FrozenReference, frozen_settings
from ds_stochdpo.engine.settings import fill_model_sizes, resolve_settings, zero_stage
from ds_stochdpo.errors import ConfigError
from ds_stochdpo.model import ScoringOptions, TwoLaneModel, choose_backend, family_of

logger = logging.getLogger(__name__)


def initialize(
    *,
    model: PreTrainedModel,
    config: StochDPOConfig,
    deepspeed: dict[str, Any] | str | Path | None = None,
    ref_model: PreTrainedModel | None = None,
    lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
) -> StochDPOEngine:
    """Wrap a causal LM for pruned preference training. Collective; starts the process group if there is none.

    Args:
        model: Policy of a supported family; it is changed in place and trains without dropout.
        config: Settings; what they leave open is taken from the DeepSpeed JSON.
        deepspeed: DeepSpeed JSON as a dict or path; None takes `config.deepspeed`, else ZeRO stage 0.
        ref_model: Frozen reference of any supported family, changed in place and sharded over ranks. Needed for
            `reference: online`; with `cached` it is what `add_reference` scores. None: the reference is the policy as
            it is before the first step.
        lr_scheduler: Makes a torch scheduler from the optimizer; None keeps the learning rate constant.

    Returns:
        The engine.

    Raises:
        ConfigError: If settings contradict each other or cannot run here.
        ModelError: If the model cannot be run in two lanes.
    """
    if ref_model is not None and config.reference == "none":
        raise ConfigError("ref_model is given, but reference is none; use cached or online, or leave the model out.")
    if ref_model is None and config.reference == "online":
        raise ConfigError("reference is online, which needs ref_model; pass one, or use reference: cached.")
    start_process_group()
    ranks = Ranks()
    source = config.deepspeed if deepspeed is None else deepspeed
    config, ds = resolve_settings(config, source, world_size=ranks.world_size)
    for lm in (model, ref_model):
        _check_dtype(lm, bool(config.bf16))
    is_half = config.bf16 or ds.get("torch_autocast", {}).get("enabled")
    backend_name, backend = choose_backend(
        config.attn_implementation,
        ranks.device,
        torch.bfloat16 if is_half else torch.float32,
        caps_attention=any(family_of(lm).caps_attention(lm.config) for lm in (model, ref_model) if lm is not None),
    )
    if ranks.is_main:
        logger.info("attention backend: %s", backend_name)
        if config.bf16 and ds["bf16"].get("bf16_master_weights_and_grads"):
            logger.warning(
                "bf16.bf16_master_weights_and_grads is true in the DeepSpeed JSON: there are no fp32 master weights, "
                "and an update of less than about 1/500 of a weight is lost."
            )
    scoring = ScoringOptions(config.score_chunk_rows, config.score_recompute)
    two_lane = TwoLaneModel(
        model,
        backend,
        scoring,
        gradient_checkpointing=config.gradient_checkpointing,
        activation_offload=config.activation_offload,
        mlp_tile_tokens=config.mlp_tile_tokens,
    )
    ds = fill_model_sizes(ds, model.config.hidden_size)
    engine = StochDPOEngine(_wrap(two_lane, config, ds, lr_scheduler), two_lane, config, ds, ranks, backend_name)
    if ref_model is not None:
        reference = TwoLaneModel(ref_model, backend, scoring, mlp_tile_tokens=config.mlp_tile_tokens)
        engine.reference = FrozenReference(reference, frozen_settings(ds))
    return engine


def _check_dtype(lm: PreTrainedModel | None, bf16: bool) -> None:
    """Transformers keeps the dtype of the files, so a model may arrive in another precision than the settings say."""
    dtypes = {p.dtype for p in lm.parameters()} if lm is not None else set()
    wrong = dtypes - ({torch.float32, torch.bfloat16} if bf16 else {torch.float32, torch.float64})
    if wrong:
        raise ConfigError(
            f"the model's weights are {wrong.pop()}, but bf16 is {str(bf16).lower()}; "
            "load it with dtype=torch.float32, or train a bfloat16 model with bf16: true."
        )


def _wrap(model: TwoLaneModel, config: StochDPOConfig, ds: dict[str, Any], lr_scheduler: Any) -> Any:
    if zero_stage(ds) == 3:
        # One all-gather then serves both lanes of a layer, and nothing inside it can be called out of step.
        ds_library.utils.set_z3_leaf_modules(model, [model.layer_class])
    with guarded_builds():
        engine, _, _, _ = ds_library.initialize(
            model=model, config=ds, model_parameters=_decay_groups(model, config), lr_scheduler=lr_scheduler
        )
    engine.train()
    return engine


def _decay_groups(model: nn.Module, config: StochDPOConfig) -> list[dict[str, Any]]:
    """Weight decay for matrices only, as the Hugging Face trainer does."""
    if not config.weight_decay:
        return [{"params": [p for p in model.parameters() if p.requires_grad]}]
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        if parameter.requires_grad:
            num_dims = len(getattr(parameter, "ds_shape", parameter.shape))
            groups[num_dims > 1].append(parameter)
    return [{"params": groups[True]}, {"params": groups[False], "weight_decay": 0.0}]
