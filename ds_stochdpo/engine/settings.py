"""One owner for every number: our settings and the DeepSpeed JSON made to agree. Entry: `resolve_settings`."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.errors import ConfigError
from ds_stochdpo.pruning import check_prefix_feasible

_NEVER = 2**31 - 1
"""For `steps_per_print`: our own log speaks, DeepSpeed's does not."""

_MONITORS = ("tensorboard", "wandb", "comet", "csv_monitor")
"""Sections with which DeepSpeed 0.19.8 logs by itself."""

_SHARED: tuple[tuple[str, tuple[str, ...], Any], ...] = (
    ("per_device_train_batch_size", ("train_micro_batch_size_per_gpu",), 8),
    ("gradient_accumulation_steps", ("gradient_accumulation_steps",), 1),
    ("learning_rate", ("optimizer", "params", "lr"), 1e-6),
    ("weight_decay", ("optimizer", "params", "weight_decay"), 0.0),
    ("max_grad_norm", ("gradient_clipping",), 1.0),
    ("bf16", ("bf16", "enabled"), False),
)
"""(our field, path in the JSON, value where neither says)."""


_SECTIONS = (
    "zero_optimization",
    "optimizer",
    "bf16",
    "fp16",
    "torch_autocast",
    "activation_checkpointing",
    "checkpoint",
)
_NUMBERS = ("gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def resolve_settings(
    config: StochDPOConfig, deepspeed: dict[str, Any] | str | Path | None, *, world_size: int
) -> tuple[StochDPOConfig, dict[str, Any]]:
    """Merge our settings with a DeepSpeed JSON.

    "auto" in the JSON takes our value; a number in the JSON stands where ours is unset; two different numbers are an
    error. The JSON keeps what only DeepSpeed knows (ZeRO stage, buckets, offload).

    Args:
        config: Our settings.
        deepspeed: JSON as a dict, its path, or None for ZeRO stage 0.
        world_size: Number of ranks.

    Returns:
        Settings with no number left open, and the dict for `deepspeed.initialize`. Values that need the model's size
        are still "auto"; `fill_model_sizes` sets them.

    Raises:
        ConfigError: If the two contradict each other or ask for what cannot be trained.
    """
    check_prefix_feasible(config.pruning)
    ds = _read(deepspeed)
    _check_shape(ds)
    if "scheduler" in ds:
        raise ConfigError("the DeepSpeed JSON has a scheduler section; remove it: lr_scheduler_type owns the schedule.")
    for monitor in _MONITORS:
        if ds.get(monitor, {}).get("enabled"):
            raise ConfigError(
                f"{monitor}.enabled is true in the DeepSpeed JSON, which would log the surrogate as train_loss; "
                "remove the section and name the tracker in report_to."
            )
    values = {key: _agree(key, getattr(config, key), path, ds, default) for key, path, default in _SHARED}
    config = dataclasses.replace(config, **values)
    _check_train_batch(config, ds, world_size)
    stage = zero_stage(ds)
    _check_precision(config, ds, stage)
    ds["train_micro_batch_size_per_gpu"] = config.per_device_train_batch_size
    # The engine counts the micro-steps itself: their number changes with the token budget.
    ds["gradient_accumulation_steps"] = 1
    ds["managed_gradient_accumulation"] = False
    ds.pop("train_batch_size", None)
    # DeepSpeed 0.19.8 clips at 1.0 when the key is absent. At stage 0 it keeps no norm, so the engine clips there.
    ds["gradient_clipping"] = config.max_grad_norm if stage else 0.0
    ds["bf16"] = {**ds.get("bf16", {}), "enabled": config.bf16}
    ds["steps_per_print"] = _NEVER
    ds.setdefault("zero_allow_untested_optimizer", True)
    if stage == 1:
        # Without managed accumulation DeepSpeed 0.19.8 refuses overlapped reduction at stage 1.
        ds["zero_optimization"]["overlap_comm"] = False
    _fill_optimizer(config, ds)
    return config, ds


def zero_stage(ds: dict[str, Any]) -> int:
    """ZeRO stage of a DeepSpeed dict; 0 where it says nothing."""
    return int(ds.get("zero_optimization", {}).get("stage", 0))


def fill_model_sizes(ds: dict[str, Any], hidden_size: int) -> dict[str, Any]:
    """Set the ZeRO bucket sizes that are "auto", as the Hugging Face trainer does.

    Args:
        ds: DeepSpeed dict from `resolve_settings`.
        hidden_size: Width of the model.

    Returns:
        A copy without any "auto".

    Raises:
        ConfigError: If an "auto" is left, naming its key.
    """
    ds = copy.deepcopy(ds)
    zero = ds.get("zero_optimization", {})
    sizes = {
        "reduce_bucket_size": hidden_size * hidden_size,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size * hidden_size),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }
    for key, size in sizes.items():
        if zero.get(key) == "auto":
            zero[key] = size
    for key in _auto_keys(ds):
        raise ConfigError(f'the DeepSpeed JSON has "auto" at {key}, which nothing here decides; write a value.')
    return ds


def _read(deepspeed: dict[str, Any] | str | Path | None) -> dict[str, Any]:
    if deepspeed is None:
        return {"zero_optimization": {"stage": 0}}
    if isinstance(deepspeed, dict):
        return copy.deepcopy(deepspeed)
    try:
        ds = json.loads(Path(deepspeed).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"deepspeed is {str(deepspeed)!r}, which cannot be read: {error.strerror}.") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"deepspeed is {str(deepspeed)!r}, which is not JSON: {error}.") from error
    if not isinstance(ds, dict):
        raise ConfigError(f"deepspeed is {str(deepspeed)!r}, which holds a {type(ds).__name__}; it must be an object.")
    return ds


def _check_shape(ds: dict[str, Any]) -> None:
    """Refuse a JSON whose sections DeepSpeed would trip over, or pass over, without a sentence."""
    for key in _SECTIONS:
        if key in ds and not isinstance(ds[key], dict):
            raise ConfigError(f"{key} in the DeepSpeed JSON is {ds[key]!r}; it must be an object.")
    for key in ds:
        known = difflib.get_close_matches(key, (*_SECTIONS, *_NUMBERS), n=1, cutoff=0.8)
        if known and known[0] != key and known[0] not in ds:
            raise ConfigError(
                f"the DeepSpeed JSON has {key!r}, which DeepSpeed does not know; did you mean {known[0]!r}?"
            )
    stage = ds.get("zero_optimization", {}).get("stage", 0)
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        raise ConfigError(f"zero_optimization.stage in the DeepSpeed JSON is {stage!r}; it must be 0, 1, 2 or 3.")
    if not isinstance(ds.get("optimizer", {}).get("params", {}), dict):
        raise ConfigError("optimizer.params in the DeepSpeed JSON must be an object.")


def _agree(key: str, ours: Any, path: tuple[str, ...], ds: dict[str, Any], default: Any) -> Any:
    theirs: Any = ds
    for part in path:
        theirs = theirs.get(part) if isinstance(theirs, dict) else None
    if theirs is None or theirs == "auto":
        return default if ours is None else ours
    if ours is not None and ours != theirs:
        raise ConfigError(
            f"{key} is {ours!r}, but {'.'.join(path)} in the DeepSpeed JSON is {theirs!r}; "
            f'make them equal, or write "auto" in the JSON.'
        )
    return theirs


def _check_train_batch(config: StochDPOConfig, ds: dict[str, Any], world_size: int) -> None:
    theirs = ds.get("train_batch_size", "auto")
    micro, steps = config.per_device_train_batch_size, config.gradient_accumulation_steps
    assert micro is not None
    assert steps is not None
    if theirs not in ("auto", micro * steps * world_size):
        raise ConfigError(
            f"train_batch_size in the DeepSpeed JSON is {theirs}, but per_device_train_batch_size {micro} x "
            f"gradient_accumulation_steps {steps} x {world_size} ranks = {micro * steps * world_size}; "
            'change one of them, or write "auto".'
        )


def _check_precision(config: StochDPOConfig, ds: dict[str, Any], stage: int) -> None:
    fp16 = ds.get("fp16", {})
    if fp16.get("enabled") == "auto":
        fp16["enabled"] = False
    if fp16.get("enabled"):
        raise ConfigError("fp16.enabled is true in the DeepSpeed JSON; only fp32 and bf16 are trained: use bf16: true.")
    if config.bf16 and stage == 0:
        raise ConfigError(
            "bf16 is true with ZeRO stage 0, where DeepSpeed 0.19.8 lets gradients drift; "
            "set zero_optimization.stage to 1, 2 or 3 in the DeepSpeed JSON, or bf16: false."
        )


def _fill_optimizer(config: StochDPOConfig, ds: dict[str, Any]) -> None:
    if "optimizer" not in ds:
        # torch's AdamW: DeepSpeed's own would be compiled at start.
        ds["optimizer"] = {"type": "AdamW", "params": {"torch_adam": True}}
        if "offload_optimizer" in ds.get("zero_optimization", {}):
            ds["zero_force_ds_cpu_optimizer"] = False
    params = ds["optimizer"].setdefault("params", {})
    is_adam = str(ds["optimizer"].get("type", "")).lower() in ("adam", "adamw")
    offloads = "offload_optimizer" in ds.get("zero_optimization", {})
    if is_adam and not offloads and get_accelerator().device_name() == "cpu":
        # DeepSpeed would compile its fused Adam for the CPU at start; torch's takes the same steps.
        params.setdefault("torch_adam", True)
    ours = {"lr": config.learning_rate, "weight_decay": config.weight_decay, "betas": [0.9, 0.999], "eps": 1e-8}
    for key, value in ours.items():
        if params.get(key) == "auto" or (key in ("lr", "weight_decay") and key not in params):
            params[key] = value


def _auto_keys(node: Any, path: str = "") -> Iterator[str]:
    if node == "auto":
        yield path
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from _auto_keys(value, f"{path}.{key}" if path else key)
