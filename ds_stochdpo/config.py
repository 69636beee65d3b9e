"""Settings of a run. One field is one YAML key and one command-line flag; importing this file loads no torch.

Entry: `StochDPOConfig(...)`, which checks itself. Fields whose default is None take the value of the DeepSpeed JSON
where that holds a number, else the default in their help text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ds_stochdpo.checks import COLUMNS, check_settings, require_choice, require_number, to_float
from ds_stochdpo.errors import faults_with

POSITION_SAMPLERS = ("systematic", "bernoulli", "fixed", "stratified")
PREFIX_SAMPLERS = ("two_point", "floor", "uniform", "geometric")
PREFIX_WEIGHTINGS = ("ipw", "none")
BRANCHES = ("both", "single")
BRANCH_BALANCES = ("balanced", "iid")
LOSS_TYPES = ("sigmoid", "robust", "hinge")
LR_SCHEDULERS = ("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup",
                 "inverse_sqrt")  # fmt: skip
"""Schedules of transformers that need no argument of their own."""

_MAPPING_HELP = (
    "Columns that have other names, as THEIRS=OURS: question=prompt,good=chosen,bad=rejected (or a JSON object, or a "
    f"mapping in YAML). OURS is one of {', '.join(COLUMNS)}."
)
_ERRORS_HELP = (
    "What a broken row does: stop ends the run, skip drops and counts it. Broken rows: "
    f"{faults_with('data_errors')}. Whatever this says, dropped and counted are: {faults_with('drop')}. An error if a "
    f"set begins with it, else dropped and counted: {faults_with('first row')}. Always an error: "
    f"{faults_with('stop')}, and files that cannot be read or are no whole JSON array."
)


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
            require_number(key, getattr(self, key), low=0.0, high=1.0, low_open=True)
        if self.branch_prob != "sqrt_length":
            require_number(
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
            require_choice(key, getattr(self, key), allowed)


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
    max_shard_size: str = _doc("5GB", "Largest weight file of the exported model: a number with KB, MB, GB or TB.")
    overwrite_output_dir: bool = _doc(False, "Replace what an earlier run left in output_dir, its checkpoints too.")
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

    column_mapping: Mapping[str, str] | None = _doc(None, _MAPPING_HELP)
    data_errors: Literal["stop", "skip"] = _doc("stop", _ERRORS_HELP)

    max_length: int | None = _doc(None, "Longest prompt plus response, in tokens. None: the model's context.")
    max_prompt_length: int | None = _doc(None, "Longest prompt, in tokens. None: what max_length leaves.")
    truncation_mode: Literal["keep_end", "keep_start"] = _doc(
        "keep_end", "Which end of a prompt that is too long is kept. Responses are cut at their end."
    )
    dataset_num_proc: int | None = _doc(
        None, "Processes that tokenise. None: one for each core that this process may use, 16 at most. Their work is "
        "kept in the cache of `datasets` (HF_DATASETS_CACHE).",
    )  # fmt: skip
    streaming: bool = _doc(
        False, "Read and tokenise the training pairs while the run goes on, in the order of the stream, not shuffled; "
        "nothing is kept. Needs max_steps and reference: online or none; dataset_test_split is loaded as usual.",
    )  # fmt: skip
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
    non_finite: Literal["stop", "skip"] = _doc(
        "stop", "What a step does whose loss or gradient is inf or nan: stop ends the run; skip passes over the step, "
        "leaves weights and optimizer as they are, and counts it in steps/skipped.",
    )  # fmt: skip
    non_finite_limit: int = _doc(5, "Most steps that non_finite: skip passes over in a row; one more ends the run.")
    num_train_epochs: float = _doc(1.0, "Passes over the pairs.")
    max_steps: int = _doc(-1, "Optimizer steps; -1: as num_train_epochs says.")
    logging_steps: int = _doc(1, "Optimizer steps between lines of metrics.jsonl.")
    eval_steps: int | None = _doc(None, "Optimizer steps between evaluations. None: before and after training.")
    save_steps: int | None = _doc(
        None, "Optimizer steps between checkpoints; the last step is saved too. None: no checkpoints."
    )
    save_total_limit: int | None = _doc(None, "Keep only this many checkpoints, the newest. None: all.")
    resume_from_checkpoint: str | None = _doc(
        None, "Continue from this checkpoint folder; latest (or true): from the newest complete one in output_dir, "
        "or from the beginning where no run has left anything. None: start anew.",
    )  # fmt: skip
    resume_override: str | None = _doc(
        None, "Settings that may differ from those of the checkpoint, joined by commas; true: all of them."
    )
    seed: int = _doc(0, "Seed of data order and draws.")
    bf16: bool | None = _doc(None, "Train in bfloat16 with fp32 master weights, ZeRO stages 1 to 3 (default false).")
    gradient_checkpointing: bool = _doc(False, "Recompute the layers of the live lane in the backward pass.")
    activation_offload: bool = _doc(
        False, "Keep inputs of recomputed layers in host memory until then (gradient_checkpointing). CPU: no effect."
    )
    mlp_tile_tokens: int | None = _doc(
        None,
        "Tokens that meet a feed-forward block at once, each tile recomputed in the backward pass. None: all.",
    )
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

    step_timeout_s: float = _doc(
        900.0, "Seconds without a finished micro-batch after which a rank counts as hanging and the run ends, with the "
        "stack of the late rank; 0 is off.",
    )  # fmt: skip
    ddp_timeout: int = _doc(1800, "Longest wait in one collective, in seconds; longer than step_timeout_s.")

    score_chunk_rows: int = _doc(256, "Rows that meet the output head at once.")
    score_recompute: bool = _doc(True, "Recompute each chunk in the backward pass instead of keeping it.")

    def __post_init__(self) -> None:
        if self.branch_prob != "sqrt_length":
            self.branch_prob = to_float("branch_prob", self.branch_prob)  # type: ignore[assignment]
        check_settings(self)
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
