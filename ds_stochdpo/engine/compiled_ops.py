"""The ops that DeepSpeed compiles at start: no endless wait for a build that was killed. Entry: `guarded_builds`.

torch keeps a file named `lock` beside an op while it compiles it, and whoever finds one waits, without a word or an
end, until it is gone. A build that was killed leaves it there for good.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.builder import OpBuilder
from torch.utils.cpp_extension import _get_build_directory

from ds_stochdpo.errors import ConfigError

logger = logging.getLogger(__name__)

LONGEST_BUILD_S = 900.0
"""A lock older than this belongs to no build that is still going on."""
FIRST_WORD_S = 10.0
POLL_S = 0.5
_LONGEST_REASON = 200
_WITHOUT = '"torch_adam": true in optimizer.params of the DeepSpeed JSON does without a compiled Adam'


def skip_cpu_comm_build() -> None:
    """On CPU, DeepSpeed 0.19.8 compiles `deepspeed_shm_comm` at start: 40 s or more.

    The op serves only `inference_all_reduce`. Can go when `init_distributed` no longer builds it.
    """
    if get_accelerator().device_name() == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


@contextmanager
def guarded_builds() -> Iterator[None]:
    """Around every call in which DeepSpeed may compile or load an op.

    Another build of the same op is waited for until its lock is `LONGEST_BUILD_S` old, and the waiting is said.

    Raises:
        ConfigError: If an op has such an old lock, or cannot be compiled or loaded, naming the op, the file or the
            reason, and the remedy.
    """
    original = OpBuilder.jit_load

    def jit_load(builder: Any, verbose: bool = True) -> Any:
        folder = Path(_get_build_directory(builder.name, verbose=False))
        _wait_for_other_build(builder.name, folder / "lock")
        if _speaks() and not (folder / f"{builder.name}.so").exists():
            logger.info("DeepSpeed compiles %s in %s, which takes minutes", builder.name, folder)
        try:
            return original(builder, verbose)
        except Exception as error:
            raise ConfigError(
                f"DeepSpeed's op {builder.name}, which the DeepSpeed JSON asks for, cannot be compiled or loaded "
                f"({_in_short(error)}); install a C++ compiler (and nvcc for a GPU), or take another optimizer or "
                f"offload: {_WITHOUT}."
            ) from error

    OpBuilder.jit_load = jit_load
    try:
        yield
    except Exception as error:
        # DeepSpeed wraps what goes wrong in an op into errors of its own, which do not say what.
        told: BaseException | None = error
        while told is not None and not isinstance(told, ConfigError):
            told = told.__cause__
        if told is None:
            raise
        raise told from told.__cause__
    finally:
        OpBuilder.jit_load = original


def _wait_for_other_build(op: str, lock: Path) -> None:
    started, has_spoken = time.monotonic(), False
    while (age := _age(lock)) is not None:
        remedy = f"if nothing compiles it, delete that file, or set TORCH_EXTENSIONS_DIR to an empty folder; {_WITHOUT}"
        if age > LONGEST_BUILD_S:
            raise ConfigError(
                f"DeepSpeed's op {op} is locked by {lock}, which is {age / 60:.0f} minutes old: a build that was "
                f"killed left it; {remedy}."
            )
        if not has_spoken and _speaks() and time.monotonic() - started > FIRST_WORD_S:
            has_spoken = True
            logger.warning("waiting for another build of DeepSpeed's op %s, locked by %s; %s", op, lock, remedy)
        time.sleep(POLL_S)


def _age(lock: Path) -> float | None:
    """Seconds since a lock was made; None if there is none."""
    try:
        return time.time() - lock.stat().st_mtime
    except FileNotFoundError:
        return None


def _speaks() -> bool:
    """One rank of a node compiles and the others wait for it: one of them speaks."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _in_short(error: Exception) -> str:
    """The end of a compiler's output says what was wrong."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST_REASON else f"...{text[-_LONGEST_REASON:]}"
