"""Which checkpoint a run continues from, and whether it is the same run. Entry: `choose_start`."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.data import PairSet, PairStream
from ds_stochdpo.engine import Ranks
from ds_stochdpo.engine.checkpoint import check_same_folder, read_state
from ds_stochdpo.engine.completeness import find_damage
from ds_stochdpo.engine.settings import zero_stage
from ds_stochdpo.engine.universal import check_convertible
from ds_stochdpo.errors import CheckpointError, ConfigError
from ds_stochdpo.train.checkpoints import find_checkpoints, newest_complete

logger = logging.getLogger(__name__)

_FREE = frozenset(
    "output_dir overwrite_output_dir dry_run dry_run_ranks dry_run_model_config reference_cache_dir log_draws "
    "report_to logging_steps eval_steps save_steps save_total_limit resume_from_checkpoint resume_override deepspeed "
    "dataset_test_split dataset_num_proc per_device_eval_batch_size max_shard_size "
    "step_timeout_s ddp_timeout non_finite non_finite_limit "
    # The fingerprints say whether these have changed anything.
    "model_name_or_path ref_model_name_or_path dataset_name dataset_train_split max_length max_prompt_length "
    "truncation_mode max_samples column_mapping data_errors "
    # Only their product with the ranks counts.
    "per_device_train_batch_size gradient_accumulation_steps".split()
)
"""Settings that may be changed when a run is resumed."""
_ROUNDING = frozenset(
    "max_tokens_per_micro_batch gradient_checkpointing attn_implementation share_prompt share_response_start "
    "score_chunk_rows score_recompute mlp_tile_tokens activation_offload".split()
)
"""Settings that change nothing but rounding; a change is told and recorded."""
_SAME_STEP = ("lr", "weight_decay", "torch_adam", "fused", "foreach")
"""Of the optimizer in the JSON: two are settings of ours, the others choose a kernel."""
_STREAMED = tuple(
    "dataset_train_split max_length max_prompt_length truncation_mode max_samples column_mapping data_errors".split()
)
"""Compared where the pairs are streamed, so that no fingerprint is known ahead."""
_ALIASES = {
    "dataset_name": "data",
    "model_name_or_path": "model",
    "ref_model_name_or_path": "reference_model",
    "gradient_accumulation_steps": "pairs_per_step",
    "per_device_train_batch_size": "pairs_per_step",
}


@dataclass(frozen=True)
class Start:
    """The checkpoint a run continues from.

    Attributes:
        folder: The checkpoint.
        state: Its state.json.
        changes: Settings that differ from the saved ones: [saved, given].
    """

    folder: Path
    state: dict[str, Any]
    changes: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def progress(self) -> dict[str, Any]:
        """What the training loop saved."""
        progress: dict[str, Any] = self.state["run"]["progress"]
        return progress

    @property
    def record(self) -> dict[str, Any]:
        """This start as run.json keeps it."""
        facts = {key: self.state[key] for key in ("step", "world_size", "zero_stage")}
        return {"from": str(self.folder), **facts, "changes": self.changes}


def run_identity(
    config: StochDPOConfig,
    ds: dict[str, Any],
    train_set: PairSet | PairStream,
    digests: dict[str, str | None],
    *,
    world_size: int,
) -> dict[str, Any]:
    """What makes a run the same run, as plain JSON values.

    Args:
        config: Settings with nothing left open.
        ds: DeepSpeed dict from `resolve_settings`.
        train_set: The training pairs; of a stream only the names of its files are compared.
        digests: Digests of the weights of `model` and `reference_model`; None where unknown.
        world_size: Ranks.

    Returns:
        `identity`, which must be equal; its sha256 as `settings_hash`; and `rounding`, which may differ.
    """
    settings = config.to_dict()
    identity = {key: value for key, value in settings.items() if key not in _FREE | _ROUNDING}
    micro, accumulation = config.per_device_train_batch_size or 1, config.gradient_accumulation_steps or 1
    params = ds["optimizer"].get("params", {})
    identity |= {
        "pairs_per_step": world_size * micro * accumulation,
        "data": _data_identity(settings, train_set),
        "optimizer": {
            "type": ds["optimizer"]["type"],
            **{key: value for key, value in params.items() if key not in _SAME_STEP},
        },
        **digests,
    }
    rounding = {key: value for key, value in settings.items() if key in _ROUNDING}
    rounding |= {"world_size": world_size, "zero_stage": zero_stage(ds)}
    # A round trip, so that what is compared later is what JSON keeps.
    identity = json.loads(json.dumps(identity))
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return {"settings_hash": digest, "identity": identity, "rounding": rounding}


def _data_identity(settings: dict[str, Any], train_set: PairSet | PairStream) -> dict[str, Any]:
    if isinstance(train_set, PairSet):
        return {"pairs": len(train_set.pairs), "fingerprint": train_set.fingerprint}
    return {"files": [Path(name).name for name in train_set.files], **{key: settings[key] for key in _STREAMED}}


def choose_start(config: StochDPOConfig, ranks: Ranks, ds: dict[str, Any], own: dict[str, Any]) -> Start | None:
    """The checkpoint to continue from, the same on all ranks; needs no model. Collective.

    Args:
        config: Settings; `resume_from_checkpoint` and `resume_override` decide.
        ranks: This process among the others.
        ds: DeepSpeed dict from `resolve_settings`.
        own: This run, from `run_identity`.

    Returns:
        None if the run starts from the beginning.

    Raises:
        CheckpointError: If there is no complete checkpoint, ranks see different ones, or it was saved with other
            settings, ranks or ZeRO stage than can go on here.
    """
    if config.resume_from_checkpoint is None:
        return None
    # Rank 0 decides, so that no rank can take another one.
    folder = ranks.on_main(lambda: _choose(config), may_take_long=False)
    if folder is None:
        return None
    check_same_folder(ranks, folder)
    state = ranks.on_main(lambda: read_state(folder), may_take_long=False)
    if "identity" not in state["run"]:
        raise CheckpointError(
            f"{folder} was saved by the Python API, without settings and data; load it with engine.load_checkpoint."
        )
    check_convertible(state, folder, stage=zero_stage(ds), world_size=ranks.world_size)
    saved = state["run"]
    changes = _differences(saved["identity"], own["identity"])
    _check_layout(folder, saved["identity"], own["identity"])
    known = set(own["identity"]) | set(_ALIASES)
    _check_changes(config, folder, changes, known=known, world_size=ranks.world_size)
    changes |= _differences(saved["rounding"], own["rounding"])
    if ranks.is_main:
        logger.info("resuming from %s, optimizer step %d", folder, state["step"])
        for key, (before, now) in changes.items():
            logger.warning("resuming with another %s: saved %s, given %s", key, _shown(before), _shown(now))
    return Start(folder, state, changes)


def _choose(config: StochDPOConfig) -> Path | None:
    output_dir = Path(config.output_dir)
    if config.resume_from_checkpoint == "latest":
        if find_checkpoints(output_dir):
            return newest_complete(output_dir)
        logger.info("%s holds no checkpoint yet; starting from the beginning", output_dir)
        return None
    folder = Path(str(config.resume_from_checkpoint))
    damage = find_damage(folder)
    if damage is None:
        return folder
    if find_checkpoints(folder):
        return newest_complete(folder)
    whole = [path for _, path in find_checkpoints(folder.parent) if find_damage(path) is None]
    hint = f" The last complete one there is {whole[-1]}." if whole else ""
    raise CheckpointError(f"resume_from_checkpoint is {folder}, which is no complete checkpoint: {damage}.{hint}")


def _differences(saved: dict[str, Any], given: dict[str, Any]) -> dict[str, list[Any]]:
    """A setting that one side does not know is new or gone, and a digest that one side lacks was not computed."""
    both = [key for key in given if key in saved and None not in (saved[key], given[key])]
    missing = [
        key
        for key in given
        if key in saved and (saved[key] is None) != (given[key] is None) and key not in ("model", "reference_model")
    ]
    return {key: [saved[key], given[key]] for key in (*both, *missing) if saved[key] != given[key]}


def _check_changes(
    config: StochDPOConfig, folder: Path, changes: dict[str, list[Any]], *, known: set[str], world_size: int
) -> None:
    allowed = config.resume_override or ""
    names = {name.strip() for name in allowed.split(",") if name.strip()}
    if names == {"true"}:
        return
    if unknown := sorted(names - known):
        raise ConfigError(f"resume_override names {', '.join(unknown)}; it can name {', '.join(sorted(known))}.")
    refused = {key: pair for key, pair in changes.items() if key not in {_ALIASES.get(name, name) for name in names}}
    if refused:
        rows = "".join(f"\n  {key}: saved {_shown(a)}, given {_shown(b)}" for key, (a, b) in sorted(refused.items()))
        if "pairs_per_step" in refused:
            rows += (
                f"\n  (pairs_per_step is {world_size} rank(s) x per_device_train_batch_size "
                f"{config.per_device_train_batch_size} x gradient_accumulation_steps "
                f"{config.gradient_accumulation_steps}: keep the product)"
            )
        raise CheckpointError(
            f"{folder} was saved with other settings than this run has:{rows}\n"
            "Give the saved ones, or name those that may differ in resume_override (true: all of them)."
        )


def _check_layout(folder: Path, saved: dict[str, Any], own: dict[str, Any]) -> None:
    """Changes that no override allows, since DeepSpeed's state is laid out by them."""
    reasons = {
        "bf16": (saved["bf16"], own["bf16"]),
        "optimizer.type": (saved["optimizer"]["type"], own["optimizer"]["type"]),
        # Without decay all parameters form one group.
        "weight_decay (from or to 0)": (bool(saved["weight_decay"]), bool(own["weight_decay"])),
    }
    for key, (before, now) in reasons.items():
        if before != now:
            raise CheckpointError(
                f"{folder} cannot go on with another {key}: saved {before}, given {now}. Give the saved one, or begin "
                "a new run from exported weights: name their folder as model_name_or_path."
            )


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_shown, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(part)}" for key, part in value.items())
    text = str(value)
    return text[:12] if len(text) == 64 else text
