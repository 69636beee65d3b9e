"""Another number of ranks: DeepSpeed's universal checkpoint, made and loaded here. Entry: `load_universal`.

Converting runs in a process of its own, since DeepSpeed's converter prints, and holds what it converts.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepspeed.checkpoint import ds_to_universal

from ds_stochdpo.engine.distributed import Ranks
from ds_stochdpo.engine.pickles import weights_only
from ds_stochdpo.errors import CheckpointError

logger = logging.getLogger(__name__)

_FAMILIES = ((0,), (1, 2), (3,))
"""ZeRO stages whose checkpoints DeepSpeed 0.19.8 can turn into each other."""
_SECONDS_BETWEEN_LINES = 10.0
_CONVERTER = "import sys; from ds_stochdpo.engine.universal import run_converter; run_converter(*sys.argv[1:])"


def check_convertible(state: dict[str, Any], folder: Path, *, stage: int, world_size: int) -> None:
    """Refuse what cannot be loaded with this ZeRO stage and number of ranks; needs no model.

    Args:
        state: state.json of the checkpoint.
        folder: The checkpoint, for the message.
        stage: ZeRO stage of this run.
        world_size: Ranks of this run.

    Raises:
        CheckpointError: With what can be done instead.
    """
    saved = (int(state["zero_stage"]), int(state["world_size"]))
    if saved == (stage, world_size):
        return
    facts = f"{folder} was saved by {saved[1]} rank(s) at ZeRO stage {saved[0]}; this run has {world_size} at {stage}"
    way_out = (
        f"start with ZeRO stage {saved[0]} on {saved[1]} rank(s), or begin a new run from the weights alone: export "
        "them there and name that folder as model_name_or_path, and the model it started from as "
        "ref_model_name_or_path"
    )
    if not any(saved[0] in family and stage in family for family in _FAMILIES):
        raise CheckpointError(f"{facts}, and DeepSpeed cannot convert between these stages; {way_out}.")
    if stage and state["optimizer"].lower() not in ("adam", "adamw"):
        raise CheckpointError(
            f"{facts}, and DeepSpeed converts only Adam's state, not {state['optimizer']}'s; {way_out}."
        )


def load_universal(ds_engine: Any, ranks: Ranks, folder: Path, tag: str) -> None:
    """Convert DeepSpeed's state in `folder / tag` and load it. Collective; the converted copy is removed again.

    Args:
        ds_engine: DeepSpeed engine of any number of ranks.
        ranks: This process among the others.
        folder: A checkpoint on a file system that all ranks share and rank 0 can write to.
        tag: Folder of DeepSpeed's files in it.

    Raises:
        CheckpointError: If the converter fails, with its last words.
    """
    universal = folder.with_name(f".{folder.name}.universal")
    ranks.on_main(lambda: _convert(folder / tag, universal / tag))
    with _expecting_universal(ds_engine):
        # Every rank: each reads its share of every tensor.
        ds_engine.load_checkpoint(str(universal), tag=tag)
    _separate_steps(ds_engine.optimizer.optimizer)
    ranks.barrier()
    if ranks.is_main:
        shutil.rmtree(universal, ignore_errors=True)


@contextlib.contextmanager
def _expecting_universal(ds_engine: Any) -> Iterator[None]:
    ds_engine._config.load_universal_checkpoint = True
    try:
        yield
    finally:
        ds_engine._config.load_universal_checkpoint = False


def _separate_steps(optimizer: Any) -> None:
    """DeepSpeed 0.19.8 gives all groups at ZeRO-3 one step tensor, which Adam then counts up once for each of them."""
    for state in optimizer.state.values():
        if hasattr(state.get("step"), "clone"):
            state["step"] = state["step"].clone()


def _convert(source: Path, target: Path) -> None:
    shutil.rmtree(target.parent, ignore_errors=True)
    try:
        target.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(
            f"{target} cannot be made ({error.strerror}); converting a checkpoint for another number of ranks writes "
            "beside it: copy the checkpoint to where that is allowed."
        ) from error
    logger.info("converting %s for another number of ranks", source)
    log = target.parent / "converter.log"
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", _CONVERTER, str(source), str(target)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        try:
            _follow(process, target)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode:
        words = " | ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:])
        shutil.rmtree(target.parent, ignore_errors=True)
        raise CheckpointError(
            f"{source} cannot be converted for this number of ranks (exit code {process.returncode}): {words}"
        )


def _follow(process: subprocess.Popen[bytes], target: Path) -> None:
    """Tell how many tensors are done while the converter works."""
    next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
    while process.poll() is None:
        time.sleep(0.1)
        if time.monotonic() >= next_line:
            next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
            cut, merged = (sum(1 for _ in path.glob("*")) for path in (target / "tmp", target / "zero"))
            logger.info("converting: %d tensors %s", merged or cut, "put together" if merged else "read")


def run_converter(source: str, target: str) -> None:
    """Convert DeepSpeed's state in one folder into a universal checkpoint in another, in this process."""
    # One worker, this process: others would not have its rules about what may be unpickled.
    settings = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    arguments = argparse.Namespace(input_folder=source, output_folder=target, inject_missing_state=True, **settings)
    with weights_only():
        ds_to_universal.main(arguments)
