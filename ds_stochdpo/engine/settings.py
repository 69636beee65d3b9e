"""One owner for every number: our settings and the DeepSpeed JSON made to agree. Entry: `resolve_settings`."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
from collections.abc import Callable, Iterator
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
_BF16_STATES = "bf16_optimizer_states"

_SHARED: tuple[tuple[str, tuple[str, ...], Any], ...] = (
    ("per_device_train_batch_size", ("train_micro_batch_size_per_gpu",), 8),
    ("gradient_accumulation_steps", ("gradient_accumulation_steps",), 1),
    ("learning_rate", ("optimizer", "params", "lr"), 1e-6),
    ("weight_decay", ("optimizer", "params", "weight_decay"), 0.0),
    ("max_grad_norm", ("gradient_clipping",), 1.0),
    ("bf16", ("bf16", "enabled"), False),
)
"""(our field, path in the JSON, value where neither says); first the two that make a batch."""

_MODEL_SIZES: dict[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda hidden_size: hidden_size * hidden_size,
    "stage3_prefetch_bucket_size": lambda hidden_size: int(0.9 * hidden_size * hidden_size),
    "stage3_param_persistence_threshold": lambda hidden_size: 10 * hidden_size,
}
"""Keys of zero_optimization that may be "auto" until the model's width is known."""

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
    given, config = config, dataclasses.replace(config, **values)
    _check_train_batch(config, given, ds, world_size)
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
    for key in _auto_keys(ds):
        if key not in (f"zero_optimization.{size}" for size in _MODEL_SIZES):
            raise ConfigError(f'the DeepSpeed JSON has "auto" at {key}, which nothing here decides; write a value.')
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
    """
    ds = copy.deepcopy(ds)
    zero = ds.get("zero_optimization", {})
    for key, size in _MODEL_SIZES.items():
        if zero.get(key) == "auto":
            zero[key] = size(hidden_size)
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
    if "bfloat16" in ds:
        raise ConfigError("the DeepSpeed JSON has a section bfloat16, an old name; call it bf16.")
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


def _theirs(ds: dict[str, Any], path: tuple[str, ...], default: Any) -> Any:
    """The JSON's value at a path, None where it says nothing or "auto"; refused if it is no number (or no switch)."""
    value: Any = ds
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    if value is None or value == "auto":
        return None
    kinds = bool if isinstance(default, bool) else int if isinstance(default, int) else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool) != isinstance(default, bool):
        wanted = "true or false" if kinds is bool else "a whole number" if kinds is int else "a number"
        raise ConfigError(f'{".".join(path)} in the DeepSpeed JSON is {value!r}; it must be {wanted}, or "auto".')
    return value


def _agree(key: str, ours: Any, path: tuple[str, ...], ds: dict[str, Any], default: Any) -> Any:
    theirs = _theirs(ds, path, default)
    if theirs is None:
        return default if ours is None else ours
    if ours is not None and ours != theirs:
        raise ConfigError(
            f"{key} is {ours!r}, but {'.'.join(path)} in the DeepSpeed JSON is {theirs!r}; "
            f'make them equal, or write "auto" in the JSON.'
        )
    return theirs


def _check_train_batch(config: StochDPOConfig, given: StochDPOConfig, ds: dict[str, Any], world_size: int) -> None:
    theirs = _theirs(ds, ("train_batch_size",), 0)
    product, factors = world_size, []
    for key, path, default in _SHARED[:2]:
        value = getattr(config, key)
        product *= value
        if getattr(given, key) is not None:
            source = "the setting"
        else:
            source = "the default" if _theirs(ds, path, default) is None else f"{path[0]} in the JSON"
        factors.append(f"{key} {value} ({source})")
    if theirs not in (None, product):
        raise ConfigError(
            f"train_batch_size in the DeepSpeed JSON is {theirs}, but {' x '.join(factors)} x {world_size} "
            f'rank{"s" * (world_size > 1)} = {product}; change one of them, or write "auto".'
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
    # DeepSpeed 0.19.8 asserts both, once the model is loaded.
    master, states = (bool(ds.get("bf16", {}).get(key)) for key in ("bf16_master_weights_and_grads", _BF16_STATES))
    if states and not master:
        raise ConfigError(f"bf16.{_BF16_STATES} is true without bf16.bf16_master_weights_and_grads; set both or none.")
    if master and not states and "offload_optimizer" not in ds.get("zero_optimization", {}):
        raise ConfigError(
            "bf16.bf16_master_weights_and_grads is true, but DeepSpeed keeps fp32 optimizer states beside bf16 weights "
            f"on the host only; add zero_optimization.offload_optimizer, or set bf16.{_BF16_STATES}: true."
        )


def _fill_optimizer(config: StochDPOConfig, ds: dict[str, Any]) -> None:
    if "optimizer" not in ds:
        # torch's AdamW, whose kernels are there: DeepSpeed's own would be compiled at start.
        ds["optimizer"] = {"type": "AdamW", "params": {"torch_adam": True, "fused": True}}
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
