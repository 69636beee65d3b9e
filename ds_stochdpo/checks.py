"""What the values of settings may be. Entry: `check_settings`; the `require_` functions serve other settings too."""

from __future__ import annotations

import math
import re
import typing
import warnings
from typing import Any

from ds_stochdpo.errors import ConfigError

TRACKERS = ("tensorboard", "wandb", "comet_ml")
"""What `report_to` can name; each is the name of its package too."""
OPTIONAL_COLUMNS = ("input", "history", "system", "tools", "chat_template_kwargs")
COLUMNS = ("prompt", "chosen", "rejected", "conversations", "instruction", *OPTIONAL_COLUMNS)
"""Names that `column_mapping` can give to a column."""


def check_settings(config: Any) -> None:
    """Refuse values that are wrong by themselves or together.

    Args:
        config: A `StochDPOConfig`; its `warmup_ratio` moves to `warmup_steps`.

    Raises:
        ConfigError: With key, value and what would do.
    """
    _check_choices(config)
    _check_loss(config)
    _check_sizes(config)
    _check_mapping(config.column_mapping)
    _check_schedule(config)
    _check_streaming(config)
    _check_resuming(config)
    _check_waiting(config)


def _check_choices(config: Any) -> None:
    for key, hint in typing.get_type_hints(type(config)).items():
        kinds, value = typing.get_args(hint) or (hint,), getattr(config, key)
        if typing.get_origin(hint) is typing.Literal:
            require_choice(key, value, kinds)
        elif bool in kinds and not (value is None and type(None) in kinds):
            require_bool(key, value)
    named = config.report_to.split(",") if isinstance(config.report_to, str) else []
    if config.report_to != "none" and (not named or not {n.strip() for n in named} <= set(TRACKERS)):
        raise ConfigError(
            f"report_to is {config.report_to!r}; allowed: none, or any of {', '.join(TRACKERS)}, joined by commas."
        )


def _check_loss(config: Any) -> None:
    require_number("beta", config.beta, low=0.0, low_open=True)
    require_number("label_smoothing", config.label_smoothing, low=0.0, high=0.5)
    if config.loss_type == "sigmoid" and config.label_smoothing == 0.5:
        warnings.warn("label_smoothing is 0.5, which leaves no preference to learn.", stacklevel=5)
    if config.loss_type == "hinge" and config.label_smoothing:
        raise ConfigError(
            f"label_smoothing is {config.label_smoothing}, but loss_type hinge has none; set it to 0 or use sigmoid."
        )
    if config.loss_type == "robust" and not 0.0 <= config.label_smoothing < 0.5:
        raise ConfigError(
            f"label_smoothing is {config.label_smoothing}; robust divides by 1 - 2 * label_smoothing: keep it < 0.5."
        )
    if config.reference == "none" and config.ref_model_name_or_path:
        raise ConfigError(
            f"ref_model_name_or_path is {config.ref_model_name_or_path}, but reference is none; "
            "use reference: cached or online, or leave the model out."
        )
    if config.reference == "none" and config.loss_type == "robust":
        raise ConfigError(
            "reference is none, but loss_type robust corrects a loss of log-ratios; "
            "use reference: cached, or loss_type sigmoid or hinge."
        )


def _check_sizes(config: Any) -> None:
    optional = ("max_length", "max_prompt_length", "max_samples", "per_device_train_batch_size", "dry_run_ranks",
                "dataset_num_proc", "gradient_accumulation_steps", "max_tokens_per_micro_batch", "eval_steps",
                "save_steps", "save_total_limit", "mlp_tile_tokens")  # fmt: skip
    for key in optional:
        if getattr(config, key) is not None:
            require_int(key, getattr(config, key), low=1)
    for key in ("per_device_eval_batch_size", "logging_steps", "score_chunk_rows"):
        require_int(key, getattr(config, key), low=1)
    require_int("seed", config.seed, low=0)
    if not re.fullmatch(r"[1-9]\d*(KB|MB|GB|TB)", str(config.max_shard_size)):
        raise ConfigError(f"max_shard_size is {config.max_shard_size!r}; write a whole number and KB, MB, GB or TB.")
    if config.activation_offload and not config.gradient_checkpointing:
        raise ConfigError(
            "activation_offload is true, but gradient_checkpointing is false, and only inputs of recomputed layers go "
            "to the host; set gradient_checkpointing: true too."
        )
    if config.max_length is not None and config.max_length < 2:
        raise ConfigError("max_length is 1; a pair needs one prompt and one response token: set 2 or more.")


def _check_mapping(mapping: Any) -> None:
    if mapping is None:
        return
    if (
        not isinstance(mapping, dict)
        or not mapping
        or not all(isinstance(v, str) for kv in mapping.items() for v in kv)
    ):
        raise ConfigError(
            f"column_mapping is {mapping!r}; it must map their columns to ours, as in {{'question': 'prompt'}}."
        )
    for theirs, ours in mapping.items():
        if ours not in COLUMNS:
            hint = f" It is written as their column, then ours: {ours}={theirs}." if theirs in COLUMNS else ""
            raise ConfigError(
                f"column_mapping names {theirs!r} {ours!r}, which is none of our columns: {', '.join(COLUMNS)}.{hint}"
            )
    twice = [ours for ours in mapping.values() if list(mapping.values()).count(ours) > 1]
    if twice:
        raise ConfigError(f"column_mapping gives two columns the name {twice[0]!r}; keep one of them.")


def _check_schedule(config: Any) -> None:
    if config.learning_rate is not None:
        require_number("learning_rate", config.learning_rate, low=0.0)
    if config.weight_decay is not None:
        require_number("weight_decay", config.weight_decay, low=0.0)
    if config.max_grad_norm is not None:
        require_number("max_grad_norm", config.max_grad_norm, low=0.0)
    require_number("num_train_epochs", config.num_train_epochs, low=0.0, low_open=True)
    if config.warmup_ratio is not None:
        require_number("warmup_ratio", config.warmup_ratio, low=0.0, high=1.0, high_open=True)
        if config.warmup_steps:
            raise ConfigError("warmup_ratio and warmup_steps are both set; keep one of them.")
        # Only one of the two stays, so that a copy of the settings checks itself again.
        config.warmup_steps, config.warmup_ratio = config.warmup_ratio, None
    require_number("warmup_steps", config.warmup_steps, low=0.0)
    if config.eval_steps is not None and config.dataset_test_split is None:
        raise ConfigError(
            f"eval_steps is {config.eval_steps}, but dataset_test_split names no pairs to evaluate; set it."
        )
    if config.dataset_test_split is not None and config.dataset_test_split == config.dataset_train_split:
        raise ConfigError(
            f"dataset_test_split is {config.dataset_test_split}, which is dataset_train_split too; "
            "name another split, or a file of held-out pairs."
        )
    if config.max_steps != -1:
        require_int("max_steps", config.max_steps, low=1, also="or -1 to train num_train_epochs")


def _check_streaming(config: Any) -> None:
    if config.streaming and config.max_steps == -1:
        raise ConfigError(
            "streaming is true, but max_steps is -1; how many pairs a stream has is not known ahead: set max_steps."
        )
    if config.streaming and config.reference == "cached":
        raise ConfigError(
            "streaming is true, but reference is cached, which needs a pass over the pairs before training; "
            "use reference: online or none."
        )


def _check_resuming(config: Any) -> None:
    for key, yes in (("resume_from_checkpoint", "latest"), ("resume_override", "true")):
        value = getattr(config, key)
        # `true` and `false` are what transformers and TRL take, as words or as values.
        word = str(value).lower() if isinstance(value, (str, bool)) else value
        if word in ("true", "latest"):
            setattr(config, key, yes)
        elif word in ("false", "none", ""):
            setattr(config, key, None)
        elif not isinstance(value, str | None):
            raise ConfigError(f"{key} is {value!r}; it must be a text, true or false.")
    if config.save_total_limit is not None and config.save_steps is None:
        raise ConfigError(
            f"save_total_limit is {config.save_total_limit}, but save_steps is not set, so nothing is saved; set it."
        )
    if config.resume_override and not config.resume_from_checkpoint:
        raise ConfigError(
            f"resume_override is {config.resume_override!r}, but nothing is resumed; set resume_from_checkpoint."
        )


def _check_waiting(config: Any) -> None:
    require_int("non_finite_limit", config.non_finite_limit, low=0)
    require_int("ddp_timeout", config.ddp_timeout, low=1)
    require_number("step_timeout_s", config.step_timeout_s, low=0.0)
    if config.step_timeout_s >= config.ddp_timeout:
        # The waiting ranks would give up first, and could not say which rank is late.
        raise ConfigError(
            f"step_timeout_s is {config.step_timeout_s:g}, but ddp_timeout is {config.ddp_timeout}; "
            "make ddp_timeout longer, or step_timeout_s shorter (0 is off)."
        )


def to_float(key: str, value: Any) -> float:
    """The number that a text means, for `branch_prob`."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{key} is {value!r}; it must be a number in (0, 1) or 'sqrt_length'.") from None


def require_choice(key: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Refuse a value that is none of `allowed`."""
    if value not in allowed:
        raise ConfigError(f"{key} is {value!r}; allowed: {', '.join(allowed)}.")


def require_bool(key: str, value: Any) -> None:
    """Refuse what is neither true nor false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{key} is {value!r}; it must be true or false.")


def require_int(key: str, value: Any, *, low: int, also: str = "") -> None:
    """Refuse what is no whole number of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(
            f"{key} is {value!r}; it must be a whole number of at least {low}{', ' + also if also else ''}."
        )


def require_number(
    key: str,
    value: Any,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    low_open: bool = False,
    high_open: bool = False,
    also: str = "",
) -> None:
    """Refuse what is no finite number in the interval; `also` names what else would do."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if is_number:
        above = value > low if low_open else value >= low
        below = value < high if high_open else value <= high
        if above and below:
            return
    left = "(" if low_open or low == -math.inf else "["
    right = ")" if high_open or high == math.inf else "]"
    raise ConfigError(
        f"{key} is {value!r}; it must be a number in {left}{low:g}, {high:g}{right}{', ' + also if also else ''}."
    )
