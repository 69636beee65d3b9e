"""DeepSpeed's .pt files: what they may build when they are read, and writing that reaches the disk. Entry: `own_files`.

DeepSpeed 0.19.8 reads all of them by full unpickling, which runs whatever a file asks for. Here torch's `weights_only`
is in force: a file can build tensors, plain containers and the classes of `SAFE_CLASSES`, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from safetensors import SafetensorError

from ds_stochdpo.engine.completeness import flush_file

SAFE_CLASSES = [LossScaler, ZeroStageEnum, fragment_address]
"""What DeepSpeed 0.19.8 pickles besides tensors and plain containers; each only holds numbers."""
_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


@contextlib.contextmanager
def weights_only() -> Iterator[None]:
    """Within the block every torch.load of this process builds nothing but `SAFE_CLASSES`, whatever it was asked."""
    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        with torch.serialization.safe_globals(SAFE_CLASSES):
            yield
    finally:
        os.environ.pop(_FORCE)
        if before is not None:
            os.environ[_FORCE] = before


class PlainFiles(TorchCheckpointEngine):
    """DeepSpeed's writer of .pt files, flushed to the disk.

    A failed write is kept instead of raised: the rank has to reach the collectives that follow in DeepSpeed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.zipfile_serialization = True
        self.problem: str | None = None

    def save(self, state_dict: Any, path: str) -> None:
        """Write one file, unless an earlier one failed."""
        if self.problem:
            return
        # torch reports a full disk as RuntimeError.
        self.problem = problem_of(lambda: torch.save(state_dict, path), path)
        self.problem = self.problem or problem_of(lambda: flush_file(Path(path)), path)


@contextlib.contextmanager
def own_files(ds_engine: Any) -> Iterator[PlainFiles]:
    """Within the block DeepSpeed writes through `PlainFiles`, and only its state."""
    theirs, files = ds_engine.checkpoint_engine, PlainFiles()
    ds_engine.checkpoint_engine = files
    # DeepSpeed would copy conversion scripts into the folder, on rank 0 alone and with an error of its own.
    ds_engine._copy_recovery_script = lambda save_path: None
    try:
        yield files
    finally:
        ds_engine.checkpoint_engine = theirs
        del ds_engine._copy_recovery_script


def problem_of(work: Callable[[], Any], path: str | Path = "") -> str | None:
    """Run `work`; what the disk refused, as a clause, or None."""
    try:
        work()
    except (OSError, RuntimeError, SafetensorError) as error:
        text = getattr(error, "strerror", None) or str(error).split("\n")[0]
        name = getattr(error, "filename", None) or path
        return f"{name}: {text}" if name else text
    return None
