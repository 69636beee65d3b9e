"""Checkpoints of an engine: DeepSpeed's state and the generators, whole or not at all. Entry: `save_checkpoint`.

    checkpoint-8/deepspeed/*.pt      what DeepSpeed saves: weights, optimizer, schedule, step
    checkpoint-8/rng/*.safetensors   random generators, a file for each rank
    checkpoint-8/state.json          step, epoch, ranks, ZeRO stage, and what the caller adds
    checkpoint-8/complete.json       names and sizes of all files; written last

Only DeepSpeed's files are pickles; `pickles.py` says what they may build.
"""

from __future__ import annotations

import contextlib
import json
import logging
import pickle
import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ds_stochdpo.engine.completeness import (
    as_readable_as_others,
    discard,
    find_damage,
    flush_file,
    marker_digest,
    partial_name,
    publish,
    write_json,
)
from ds_stochdpo.engine.distributed import Ranks
from ds_stochdpo.engine.pickles import own_files, problem_of, weights_only
from ds_stochdpo.engine.settings import zero_stage
from ds_stochdpo.engine.universal import check_convertible, load_universal
from ds_stochdpo.errors import CheckpointError

if TYPE_CHECKING:
    from ds_stochdpo.engine.engine import StochDPOEngine

logger = logging.getLogger(__name__)

STATE_FORMAT = 1
"""Raised when state.json changes its meaning."""
STATE_NAME = "state.json"
_TAG = "deepspeed"
_BROKEN_FILE = ("PytorchStreamReader", "legacy .tar format", "Ran out of input", "unexpected EOF")
"""What torch says of a file that is none of its own, or no longer."""


def save_checkpoint(engine: StochDPOEngine, folder: Path, run: dict[str, Any] | None = None) -> None:
    """Write a complete checkpoint of the engine. Collective.

    The folder gets its name when every rank has written, so that a run that ends in between leaves the older
    checkpoints and nothing that could be taken for a new one.

    Args:
        engine: Engine between two optimizer steps.
        folder: Where; its parent must be one folder for all ranks. A checkpoint of that name is replaced.
        run: Plain JSON values for the caller, kept in state.json.

    Raises:
        CheckpointError: On every rank, if one of them cannot write; what was written of this checkpoint is removed.
    """
    ranks, partial = engine.ranks, partial_name(folder)
    # Every rank: rank 0's folders must stand before another writes into them.
    problem = ranks.from_main(problem_of(lambda: _make_folders(partial)) if ranks.is_main else None)
    if not problem:
        problem = _write_state(engine, partial)
    # Every rank: one that cannot write ends all of them.
    problem = next((f"rank {r}: {p}" for r, p in enumerate(ranks.gather_objects(problem)) if p), None)
    if not problem:
        state = _engine_state(engine) | {"run": run or {}}
        work = problem_of(lambda: _finish(partial, folder, state)) if ranks.is_main else None
        problem = ranks.from_main(work)
    if problem:
        if ranks.is_main:
            with contextlib.suppress(OSError):
                discard(partial)
        raise CheckpointError(f"checkpoint {folder} cannot be written ({problem}); older checkpoints are untouched.")


def read_state(folder: Path) -> dict[str, Any]:
    """state.json of a checkpoint.

    Raises:
        CheckpointError: If the folder is no complete checkpoint of a known format.
    """
    if damage := find_damage(folder):
        raise CheckpointError(f"{folder} is no complete checkpoint: {damage}.")
    state: dict[str, Any] = json.loads((folder / STATE_NAME).read_text(encoding="utf-8"))
    if state.get("format") != STATE_FORMAT:
        raise CheckpointError(
            f"{folder / STATE_NAME} has format {state.get('format')}; this version reads format {STATE_FORMAT}."
        )
    return state


def load_checkpoint(engine: StochDPOEngine, folder: Path) -> dict[str, Any]:
    """Continue where a checkpoint was saved. Collective.

    With the same ranks and ZeRO stage the engine is bit for bit what was saved. Another number of ranks, or stage 1
    for 2, goes through DeepSpeed's universal checkpoint, which is made beside the folder and removed again.

    Args:
        engine: Engine of the same model and optimizer.
        folder: What `save_checkpoint` wrote, the same folder on every rank.

    Returns:
        state.json.

    Raises:
        CheckpointError: If the checkpoint is damaged, is not the same on every rank, or cannot be converted.
    """
    ranks = engine.ranks
    check_same_folder(ranks, folder)
    state = read_state(folder)
    stage = zero_stage(engine.ds_config)
    check_convertible(state, folder, stage=stage, world_size=ranks.world_size)
    # Scoring may have left gathers under way, which DeepSpeed 0.19.8 refuses to partition.
    engine.deepspeed.empty_partition_cache()
    options = _options(engine.deepspeed)
    is_same = stage == 0 or (state["zero_stage"], state["world_size"]) == (stage, ranks.world_size)
    try:
        with weights_only():
            if is_same:
                engine.deepspeed.load_checkpoint(str(folder), tag=_TAG)
            else:
                load_universal(engine.deepspeed, ranks, folder, _TAG)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{folder} cannot be loaded without running what a file in it asks for ({' '.join(str(error).split())})."
        ) from error
    except (RuntimeError, EOFError, KeyError) as error:
        if not any(word in str(error) for word in _BROKEN_FILE):
            raise
        raise CheckpointError(
            f"{folder} cannot be loaded: one of its files is damaged inside ({str(error).splitlines()[0][:200]}). An "
            "older checkpoint may be whole: name its folder in resume_from_checkpoint."
        ) from error
    _take_own_options(engine.deepspeed, *options)
    if engine.step != state["step"]:
        raise CheckpointError(f"{folder} says optimizer step {state['step']}, but DeepSpeed loaded {engine.step}.")
    _load_generators(folder, ranks.rank, same_ranks=state["world_size"] == ranks.world_size)
    engine.epoch = int(state["epoch"])
    engine.mark_trained()
    return state


def check_same_folder(ranks: Ranks, folder: Path) -> None:
    """Refuse a folder that is not the same for every rank. Collective."""
    # Every rank: on node-local disks each would load something else.
    digests = ranks.gather_objects(marker_digest(folder))
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise CheckpointError(
            f"rank(s) {others} do not see the checkpoint that rank 0 sees at {folder}; "
            "checkpoints belong on a file system that all machines share."
        )


def _options(ds_engine: Any) -> tuple[list[dict[str, Any]], list[float] | None]:
    """Options of each parameter group, and the rates that the schedule scales."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in ds_engine.optimizer.param_groups]
    return groups, list(ds_engine.lr_scheduler.base_lrs) if ds_engine.lr_scheduler else None


def _take_own_options(ds_engine: Any, groups: list[dict[str, Any]], base_lrs: list[float] | None) -> None:
    """Put this run's options back, which differ from the saved ones where a change was allowed.

    Also needed without a change: a universal checkpoint gives every group the options of the first (DeepSpeed 0.19.8 at
    ZeRO-3), so that weight decay would reach the norms.
    """
    scheduler = ds_engine.lr_scheduler
    for group, own in zip(ds_engine.optimizer.param_groups, groups, strict=True):
        group.update(own if base_lrs is None else {**own, "lr": group["lr"]})
    if base_lrs is not None and scheduler.base_lrs != base_lrs:
        scheduler.base_lrs = base_lrs
        factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
        for group, base, factor in zip(ds_engine.optimizer.param_groups, base_lrs, factors, strict=True):
            group["lr"] = base * factor


def state_bytes(engine: StochDPOEngine) -> int:
    """Size of a checkpoint by arithmetic: fp32 weights and two moments, and below ZeRO-3 the weights as computed.

    An optimizer with less state than Adam writes less.
    """
    parameters = list(engine.module.parameters())
    count = sum(getattr(p, "ds_numel", p.numel()) for p in parameters)
    stage = zero_stage(engine.ds_config)
    weights = parameters[0].element_size() if stage < 3 else 0
    return count * (8 + weights if stage == 0 else 12 + weights)


def _make_folders(partial: Path) -> None:
    discard(partial)
    for name in (_TAG, "rng"):
        (partial / name).mkdir(parents=True)


def _write_state(engine: StochDPOEngine, partial: Path) -> str | None:
    # An evaluation may have left gathers under way, which DeepSpeed 0.19.8 refuses to partition.
    engine.deepspeed.empty_partition_cache()
    with own_files(engine.deepspeed) as files:
        # Every rank: DeepSpeed gathers, and waits for all at its end.
        engine.deepspeed.save_checkpoint(str(partial), tag=_TAG, client_state={}, save_latest=False)
    return files.problem or problem_of(lambda: _save_generators(partial, engine.ranks.rank), partial / "rng")


def _engine_state(engine: StochDPOEngine) -> dict[str, Any]:
    return {
        "format": STATE_FORMAT,
        "step": engine.step,
        "epoch": engine.epoch,
        "world_size": engine.ranks.world_size,
        "zero_stage": zero_stage(engine.ds_config),
        "optimizer": engine.ds_config["optimizer"]["type"],
    }


def _finish(partial: Path, folder: Path, state: dict[str, Any]) -> None:
    write_json(partial / STATE_NAME, state)
    publish(partial, folder)


def _generator_file(folder: Path, rank: int) -> Path:
    return folder / "rng" / f"rank{rank:05d}.safetensors"


def _save_generators(folder: Path, rank: int) -> None:
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
    }
    if get_accelerator().device_name() != "cpu":
        tensors["device"] = get_accelerator().get_rng_state().cpu()
    rest = {"python": [version, gauss], "numpy": [kind, int(position), int(has_gauss), float(cached)]}
    path = _generator_file(folder, rank)
    save_file(tensors, path, metadata={"rest": json.dumps(rest)})
    as_readable_as_others(path)
    flush_file(path)


def _load_generators(folder: Path, rank: int, *, same_ranks: bool) -> None:
    """Nothing in a step draws from these generators, so that a missing file is worth a warning and no more."""
    path = _generator_file(folder, rank)
    if not same_ranks:
        return
    try:
        with safe_open(path, framework="pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}
            rest = json.loads(stored.metadata()["rest"])
    except (OSError, SafetensorError) as error:
        logger.warning("random generators not restored: %s (%s)", path, error)
        return
    torch.set_rng_state(tensors["torch"])
    version, gauss = rest["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), gauss))
    kind, position, has_gauss, cached = rest["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
    if "device" in tensors and get_accelerator().device_name() != "cpu":
        get_accelerator().set_rng_state(tensors["device"])


def free_bytes(folder: Path) -> int:
    """Bytes that can still be written to the file system of `folder`, or of its nearest parent that exists."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
