"""Settings of a run. One field is one YAML key and one command-line flag; importing this file loads no torch.

Entry: `StochDPOConfig(...)`, which checks itself. Fields whose default is None take the value of the DeepSpeed JSON
where that holds a number, else the default in their help text.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from dataclasses import dataclass, field
from typing import Any, Literal

from ds_stochdpo.errors import ConfigError

POSITION_SAMPLERS = ("systematic", "bernoulli", "fixed", "stratified")
PREFIX_SAMPLERS = ("two_point", "floor", "uniform", "geometric")
PREFIX_WEIGHTINGS = ("ipw", "none")
BRANCHES = ("both", "single")
BRANCH_BALANCES = ("balanced", "iid")
LOSS_TYPES = ("sigmoid", "robust", "hinge")
LR_SCHEDULERS = ("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup",
                 "inverse_sqrt")  # fmt: skip
"""Schedules of transformers that need no argument of their own."""
TRACKERS = ("tensorboard", "wandb", "comet_ml")
"""What `report_to` can name; each is the name of its package too."""


def _doc(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class PruningPlan:
    """What is sampled of each pair, and with which probabilities (METHOD.md sections 2 to 4).

    Attributes:
        position_keep: Expected share of the response positions that are scored, in (0, 1].
        position_sampler: Design that picks them.
        prefix_keep: E[K] / T of the executed response prefix K, in (0, 1].
        prefix_sampler: Law of K.
        prefix_min_survival: rho, the probability of the whole response under `two_point` and `floor`, in (0, 1].
        prefix_weighting: `ipw` weighs a position by 1 / P(K >= t); `none` leaves it out (another objective).
        branch: `single` back-propagates one branch of a pair, `both` both.
        branch_prob: Probability that the chosen branch is kept, in (0, 1), or `sqrt_length`.
        branch_balance: `balanced` draws over the pairs of an optimizer step, `iid` each pair alone.
    """

    position_keep: float = 1.0
    position_sampler: str = "systematic"
    prefix_keep: float = 1.0
    prefix_sampler: str = "two_point"
    prefix_min_survival: float = 0.25
    prefix_weighting: str = "ipw"
    branch: str = "both"
    branch_prob: float | str = 0.5
    branch_balance: str = "balanced"

    def __post_init__(self) -> None:
        for key in ("position_keep", "prefix_keep", "prefix_min_survival"):
            _require_number(key, getattr(self, key), low=0.0, high=1.0, low_open=True)
        if self.branch_prob != "sqrt_length":
            _require_number(
                "branch_prob", self.branch_prob, low=0.0, high=1.0, low_open=True, high_open=True,
                also="or 'sqrt_length'; to back-propagate both branches set branch: both",
            )  # fmt: skip
        for key, allowed in (
            ("position_sampler", POSITION_SAMPLERS),
            ("prefix_sampler", PREFIX_SAMPLERS),
            ("prefix_weighting", PREFIX_WEIGHTINGS),
            ("branch", BRANCHES),
            ("branch_balance", BRANCH_BALANCES),
        ):
            _require_choice(key, getattr(self, key), allowed)


@dataclass
class StochDPOConfig:
    """Every setting of a run; names follow TRL and transformers where they have one."""

    model_name_or_path: str = _doc("", "Folder or hub name of the policy to train.")
    ref_model_name_or_path: str | None = _doc(
        None, "Folder or hub name of the reference. None: the policy as it is before the first step."
    )
    dataset_name: str = _doc("", "Hub name, folder, or json/jsonl/jsonl.gz/parquet file of preference pairs.")
    dataset_train_split: str = _doc("train", "Split of dataset_name that is trained on.")
    dataset_test_split: str | None = _doc(
        None, "Split that is evaluated: a split name, or a json/jsonl/jsonl.gz/parquet file. None: no evaluation."
    )
    output_dir: str = _doc("outputs", "Folder for the final model, metrics.jsonl, run.json and the report.")
    overwrite_output_dir: bool = _doc(False, "Replace what an earlier run left in output_dir.")
    deepspeed: str | None = _doc(
        None, "Path of the DeepSpeed JSON. None: ZeRO stage 0. In ds_configs: zero2 (GPUs that each hold all weights), "
        "zero3 (GPUs, everything sharded), zero3_offload (GPUs with too little memory for that: weights and optimizer "
        "wait in host memory, slower), zero3_cpu (no GPU).",
    )  # fmt: skip
    dry_run: bool = _doc(
        False, "Check the settings, build the model without weights, print the plan and its predicted sizes, and end."
    )
    dry_run_ranks: int | None = _doc(None, "Ranks that a dry run plans for. None: as many as it is started with.")
    dry_run_model_config: str | None = _doc(
        None, "config.json that a dry run takes for a model that is not on disk; training does not read it."
    )

    beta: float = _doc(0.1, "Strength of the preference loss; rewards are beta times the log-ratio.")
    loss_type: Literal["sigmoid", "robust", "hinge"] = _doc(
        "sigmoid", "sigmoid (DPO, with label_smoothing: conservative DPO), robust (noise-corrected), or hinge."
    )
    label_smoothing: float = _doc(
        0.0, "Assumed share of flipped preferences, in [0, 0.5]; for sigmoid and robust (there below 0.5)."
    )
    reference: Literal["cached", "online", "none"] = _doc(
        "cached", "cached: per-token log-probs of the reference, computed once and kept on disk. "
        "online: a frozen copy, sharded over ranks, scores each step's sampled tokens. "
        "none: log pi alone, for losses that allow it (sigmoid, hinge).",
    )  # fmt: skip
    reference_cache_dir: str | None = _doc(None, "Folder of the reference cache. None: ~/.cache/ds_stochdpo.")

    max_length: int | None = _doc(None, "Longest prompt plus response, in tokens. None: the model's context.")
    max_prompt_length: int | None = _doc(None, "Longest prompt, in tokens. None: what max_length leaves.")
    truncation_mode: Literal["keep_end", "keep_start"] = _doc(
        "keep_end", "Which end of a prompt that is too long is kept. Responses are cut at their end."
    )
    max_samples: int | None = _doc(None, "Use at most this many rows of each split, from its start. None: all.")

    per_device_train_batch_size: int | None = _doc(None, "Pairs of one rank in one micro-step (default 8).")
    per_device_eval_batch_size: int = _doc(8, "Pairs of one rank in one evaluation or reference step.")
    gradient_accumulation_steps: int | None = _doc(
        None, "Micro-steps of one optimizer step (default 1). Pairs of an optimizer step = world size x both."
    )
    max_tokens_per_micro_batch: int | None = _doc(
        None, "Cut micro-batches further so that none runs more tokens than this; a longer pair runs alone."
    )
    learning_rate: float | None = _doc(None, "Peak learning rate (default 1e-6).")
    lr_scheduler_type: Literal[
        "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"
    ] = _doc("linear", "Schedule, by its name in transformers.")
    warmup_steps: float = _doc(0.0, "Warm-up steps; a fraction below 1 is a share of all steps.")
    warmup_ratio: float | None = _doc(None, "Alias: share of all steps used for warm-up.")
    weight_decay: float | None = _doc(None, "Weight decay of matrices, not of norms and biases (default 0).")
    max_grad_norm: float | None = _doc(None, "Clip the global gradient norm here; 0 is off (default 1.0).")
    num_train_epochs: float = _doc(1.0, "Passes over the pairs.")
    max_steps: int = _doc(-1, "Optimizer steps; -1: as num_train_epochs says.")
    logging_steps: int = _doc(1, "Optimizer steps between lines of metrics.jsonl.")
    eval_steps: int | None = _doc(None, "Optimizer steps between evaluations. None: before and after training.")
    seed: int = _doc(0, "Seed of data order and draws.")
    bf16: bool | None = _doc(None, "Train in bfloat16 with fp32 master weights, ZeRO stages 1 to 3 (default false).")
    gradient_checkpointing: bool = _doc(False, "Recompute the layers of the live lane in the backward pass.")
    attn_implementation: Literal["auto", "flash_attn", "torch", "sdpa"] = _doc(
        "auto", "Attention backend; auto picks the first of flash_attn, torch, sdpa that the device can run."
    )
    report_to: str = _doc(
        "none", "Trackers that get the lines of metrics.jsonl: none, or tensorboard, wandb, comet_ml joined by commas."
    )

    position_keep: float = _doc(1.0, "Expected share of response positions that are scored, in (0, 1]; 1 is off.")
    position_sampler: Literal["systematic", "bernoulli", "fixed", "stratified"] = _doc(
        "systematic", "Design that picks the scored positions."
    )
    prefix_keep: float = _doc(1.0, "E[K]/T of the executed response prefix, in (0, 1]; 1 is off.")
    prefix_sampler: Literal["two_point", "floor", "uniform", "geometric"] = _doc(
        "two_point", "Law of the prefix length K."
    )
    prefix_min_survival: float = _doc(0.25, "rho: least probability that a whole response is run, in (0, 1].")
    prefix_weighting: Literal["ipw", "none"] = _doc(
        "ipw", "ipw: weigh position t by 1/P(K >= t), unbiased log-ratio. none: a preference on prefixes."
    )
    branch: Literal["both", "single"] = _doc("both", "single: back-propagate one branch of a pair.")
    branch_prob: str = _doc("0.5", "Probability that chosen is kept, in the open (0, 1), or sqrt_length.")
    branch_balance: Literal["balanced", "iid"] = _doc(
        "balanced", "balanced: half chosen within an optimizer step; iid: every pair by itself."
    )
    coefficient: Literal["sampled"] = _doc("sampled", "Loss slope from the sampled positions and prefixes.")
    share_prompt: bool = _doc(True, "Run the prompt once for both branches (exact).")
    share_response_start: bool = _doc(True, "Score tokens that both responses start with once (exact).")
    log_draws: bool = _doc(False, "Write every draw to draws.jsonl in output_dir.")

    score_chunk_rows: int = _doc(256, "Rows that meet the output head at once.")
    score_recompute: bool = _doc(True, "Recompute each chunk in the backward pass instead of keeping it.")

    def __post_init__(self) -> None:
        if self.branch_prob != "sqrt_length":
            self.branch_prob = _to_float("branch_prob", self.branch_prob)  # type: ignore[assignment]
        self._check_choices()
        self._check_loss()
        self._check_sizes()
        self._check_schedule()
        _ = self.pruning

    @property
    def pruning(self) -> PruningPlan:
        """The sampling part of the settings, as the estimators take it."""
        return PruningPlan(**{f.name: getattr(self, f.name) for f in dataclasses.fields(PruningPlan)})

    @property
    def trackers(self) -> tuple[str, ...]:
        """Names in `report_to`, each once; none for "none"."""
        if self.report_to == "none":
            return ()
        return tuple(dict.fromkeys(name.strip() for name in self.report_to.split(",")))

    def to_dict(self) -> dict[str, Any]:
        """All settings as plain JSON values."""
        return dataclasses.asdict(self)

    def _check_choices(self) -> None:
        for key, allowed in (
            ("loss_type", LOSS_TYPES),
            ("reference", ("cached", "online", "none")),
            ("truncation_mode", ("keep_end", "keep_start")),
            ("attn_implementation", ("auto", "flash_attn", "torch", "sdpa")),
            ("coefficient", ("sampled",)),
            ("lr_scheduler_type", LR_SCHEDULERS),
        ):
            _require_choice(key, getattr(self, key), allowed)
        for key in ("overwrite_output_dir", "dry_run", "gradient_checkpointing", "share_prompt", "share_response_start",
                    "log_draws", "score_recompute"):  # fmt: skip
            _require_bool(key, getattr(self, key))
        if self.bf16 is not None:
            _require_bool("bf16", self.bf16)
        named = self.report_to.split(",") if isinstance(self.report_to, str) else []
        if self.report_to != "none" and (not named or not {n.strip() for n in named} <= set(TRACKERS)):
            raise ConfigError(
                f"report_to is {self.report_to!r}; allowed: none, or any of {', '.join(TRACKERS)}, joined by commas."
            )

    def _check_loss(self) -> None:
        _require_number("beta", self.beta, low=0.0, low_open=True)
        _require_number("label_smoothing", self.label_smoothing, low=0.0, high=0.5)
        if self.loss_type == "sigmoid" and self.label_smoothing == 0.5:
            warnings.warn("label_smoothing is 0.5, which leaves no preference to learn.", stacklevel=3)
        if self.loss_type == "hinge" and self.label_smoothing:
            raise ConfigError(
                f"label_smoothing is {self.label_smoothing}, but loss_type hinge has none; set it to 0 or use sigmoid."
            )
        if self.loss_type == "robust" and not 0.0 <= self.label_smoothing < 0.5:
            raise ConfigError(
                f"label_smoothing is {self.label_smoothing}; robust divides by 1 - 2 * label_smoothing: keep it < 0.5."
            )
        if self.reference == "none" and self.ref_model_name_or_path:
            raise ConfigError(
                f"ref_model_name_or_path is {self.ref_model_name_or_path}, but reference is none; "
                "use reference: cached or online, or leave the model out."
            )
        if self.reference == "none" and self.loss_type == "robust":
            raise ConfigError(
                "reference is none, but loss_type robust corrects a loss of log-ratios; "
                "use reference: cached, or loss_type sigmoid or hinge."
            )

    def _check_sizes(self) -> None:
        optional = ("max_length", "max_prompt_length", "max_samples", "per_device_train_batch_size", "dry_run_ranks",
                    "gradient_accumulation_steps", "max_tokens_per_micro_batch", "eval_steps")  # fmt: skip
        for key in optional:
            if getattr(self, key) is not None:
                _require_int(key, getattr(self, key), low=1)
        for key in ("per_device_eval_batch_size", "logging_steps", "score_chunk_rows"):
            _require_int(key, getattr(self, key), low=1)
        _require_int("seed", self.seed, low=0)
        if self.max_length is not None and self.max_length < 2:
            raise ConfigError("max_length is 1; a pair needs one prompt and one response token: set 2 or more.")

    def _check_schedule(self) -> None:
        if self.learning_rate is not None:
            _require_number("learning_rate", self.learning_rate, low=0.0)
        if self.weight_decay is not None:
            _require_number("weight_decay", self.weight_decay, low=0.0)
        if self.max_grad_norm is not None:
            _require_number("max_grad_norm", self.max_grad_norm, low=0.0)
        _require_number("num_train_epochs", self.num_train_epochs, low=0.0, low_open=True)
        if self.warmup_ratio is not None:
            _require_number("warmup_ratio", self.warmup_ratio, low=0.0, high=1.0, high_open=True)
            if self.warmup_steps:
                raise ConfigError("warmup_ratio and warmup_steps are both set; keep one of them.")
            # Only one of the two stays, so that a copy of the settings checks itself again.
            self.warmup_steps, self.warmup_ratio = self.warmup_ratio, None
        _require_number("warmup_steps", self.warmup_steps, low=0.0)
        if self.eval_steps is not None and self.dataset_test_split is None:
            raise ConfigError(
                f"eval_steps is {self.eval_steps}, but dataset_test_split names no pairs to evaluate; set it."
            )
        if self.dataset_test_split is not None and self.dataset_test_split == self.dataset_train_split:
            raise ConfigError(
                f"dataset_test_split is {self.dataset_test_split}, which is dataset_train_split too; "
                "name another split, or a file of held-out pairs."
            )
        if self.max_steps != -1:
            _require_int("max_steps", self.max_steps, low=1, also="or -1 to train num_train_epochs")


def _to_float(key: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{key} is {value!r}; it must be a number in (0, 1) or 'sqrt_length'.") from None


def _require_choice(key: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{key} is {value!r}; allowed: {', '.join(allowed)}.")


def _require_bool(key: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{key} is {value!r}; it must be true or false.")


def _require_int(key: str, value: Any, *, low: int, also: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(
            f"{key} is {value!r}; it must be a whole number of at least {low}{', ' + also if also else ''}."
        )


def _require_number(
    key: str,
    value: Any,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    low_open: bool = False,
    high_open: bool = False,
    also: str = "",
) -> None:
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
