"""Whether a run may write into its output_dir, and that no other does. Entry: `claim_for`, then `hold_output_dir`."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.engine import Ranks
from ds_stochdpo.errors import ConfigError
from ds_stochdpo.train.checkpoints import find_checkpoints, leftovers
from ds_stochdpo.train.trackers import TENSORBOARD_FOLDER

logger = logging.getLogger(__name__)

RUN_FILES = ("metrics.jsonl", "run.json", "draws.jsonl", "report.html", "report.png")
"""Written while a run goes on. The model beside them is replaced by the export, not before."""
LOCK_NAME = ".lock"
_WEIGHTS = "model*.safetensors"
_EVENTS = f"{TENSORBOARD_FOLDER}/events.out.tfevents.*"
_SECONDS_FOR_A_FILE = 10.0
"""What a network file system may take to show a new file to another machine."""


@dataclass(frozen=True)
class Claim:
    """What may happen to an output_dir.

    Attributes:
        stale: Files and checkpoints of an earlier run to remove, once all settings have proved right.
        continues: Whether the files of the earlier run are continued.
        newer: Checkpoints that the run's own ones will replace; to remove once the chosen one is loaded.
    """

    stale: list[Path] = field(default_factory=list)
    continues: bool = False
    newer: list[Path] = field(default_factory=list)


def claim_for(config: StochDPOConfig) -> Claim:
    """Check that the run of these settings may write into its output_dir, without touching it.

    Returns:
        What to remove and what to continue. A model of an earlier run is not among what is removed: the export
        replaces it.

    Raises:
        ConfigError: If an earlier run's results are there and may neither be overwritten nor continued, if the folder
            cannot be one, or if writing there would replace what the run reads.
    """
    folder = Path(config.output_dir)
    names = ("model_name_or_path", "ref_model_name_or_path", "dataset_name", "reference_cache_dir")
    _check_place(folder, {key: getattr(config, key) for key in names})
    found = _results(folder)
    stale = [folder / name for name in RUN_FILES if (folder / name).exists()] + sorted(folder.glob(_EVENTS))
    checkpoints = find_checkpoints(folder)
    if _continues(config, [path for _, path in checkpoints]):
        return Claim(leftovers(folder), continues=True, newer=_newer_than_chosen(config, checkpoints))
    if found and not config.overwrite_output_dir and not _is_false_start(config, folder, found):
        way_out = "resume_from_checkpoint: latest to continue it, " if checkpoints else ""
        raise ConfigError(
            f"output_dir is {folder}, which holds an earlier run ({found[0].name}); "
            f"name another folder, or set {way_out}overwrite_output_dir: true to start afresh."
        )
    return Claim([*stale, *(path for _, path in checkpoints), *leftovers(folder)])


def _check_place(folder: Path, inputs: Mapping[str, str | None]) -> None:
    for path in (folder, *folder.parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"output_dir is {folder}, but {path} is a file; name a folder.")
    for key, name in inputs.items():
        if name and Path(name).exists() and Path(name).resolve() == folder.resolve():
            raise ConfigError(
                f"output_dir is {folder}, which is {key} too; the trained model would replace it: name another folder."
            )


def _results(folder: Path) -> list[Path]:
    """What an earlier run would lose; a run.json or an empty file alone is left by a start that failed."""
    written = [folder / name for name in RUN_FILES if name != "run.json"]
    files = [path for path in written if path.exists() and path.stat().st_size]
    return [
        *files,
        *sorted(folder.glob(_WEIGHTS)),
        *sorted(folder.glob(_EVENTS)),
        *(path for _, path in find_checkpoints(folder)),
    ]


def _continues(config: StochDPOConfig, checkpoints: list[Path]) -> bool:
    if _wants_newest(config):
        return bool(checkpoints)
    chosen = config.resume_from_checkpoint
    return chosen is not None and Path(chosen).resolve() in (path.resolve() for path in checkpoints)


def _wants_newest(config: StochDPOConfig) -> bool:
    chosen = config.resume_from_checkpoint
    return chosen is not None and (chosen == "latest" or Path(chosen).resolve() == Path(config.output_dir).resolve())


def _newer_than_chosen(config: StochDPOConfig, checkpoints: list[tuple[int, Path]]) -> list[Path]:
    """Checkpoints of a future that is about to be trained anew; they may go only where that is allowed."""
    if config.resume_from_checkpoint is None or _wants_newest(config):
        return []
    chosen = Path(config.resume_from_checkpoint).resolve()
    step = next(step for step, path in checkpoints if path.resolve() == chosen)
    newer = [path for other, path in checkpoints if other > step]
    if newer and not config.overwrite_output_dir:
        raise ConfigError(
            f"resume_from_checkpoint is {config.resume_from_checkpoint}, but {newer[-1].name} in the same output_dir "
            "is newer; use resume_from_checkpoint: latest, name another output_dir, or set overwrite_output_dir: true "
            "to remove what is newer."
        )
    return newer


def _is_false_start(config: StochDPOConfig, folder: Path, found: list[Path]) -> bool:
    """A run to be continued that ended before its first checkpoint has nothing that the same command cannot redo."""
    return _wants_newest(config) and not list(folder.glob(_WEIGHTS))


def remove(paths: Sequence[Path]) -> None:
    """Remove files and folders; what is not there is no matter, and what a link leads to stays.

    Raises:
        ConfigError: If one of them cannot be removed.
    """
    try:
        _remove(paths)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be removed: {error.strerror or error}.") from error
    if paths:
        logger.info("removed from %s: %s", paths[0].parent, ", ".join(path.name for path in paths))


def _remove(paths: Sequence[Path]) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def hold_output_dir(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Keep other runs out of `folder` for the time of a block, and see that all ranks mean one folder. Collective.

    Args:
        folder: This rank's output_dir; made if missing.
        ranks: This process among the others.

    Raises:
        ConfigError: If another run writes there, nothing can be written, or ranks see different folders.
    """
    lock = FileLock(folder / LOCK_NAME)
    marker = folder / str(ranks.on_main(lambda: _take(lock, folder)))
    try:
        own = (_sees(marker), socket.gethostname(), str(folder.resolve()))
        # Every rank: one that writes elsewhere would leave half a checkpoint here and half there.
        seen = ranks.gather_objects(own)
        if ranks.is_main:
            marker.unlink(missing_ok=True)
        blind = [f"rank {r} ({host}: {path})" for r, (sees, host, path) in enumerate(seen) if not sees]
        if blind:
            raise ConfigError(
                f"output_dir is {folder}, but {', '.join(blind)} cannot see a file that rank 0 ({seen[0][1]}: "
                f"{seen[0][2]}) wrote there; name a folder on a file system that all machines share."
            )
        yield
    finally:
        lock.release()


def _take(lock: FileLock, folder: Path) -> str:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
        marker = folder / f".seen-by-all-ranks-{uuid.uuid4().hex}"
        marker.write_text(f"{os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
    except Timeout:
        raise ConfigError(
            f"output_dir is {folder}, where another run is writing now; name another folder, or wait for its end."
        ) from None
    except OSError as error:
        raise ConfigError(f"output_dir is {folder}, which cannot be written: {error.strerror or error}.") from error
    return marker.name


def _sees(marker: Path) -> bool:
    deadline = time.monotonic() + _SECONDS_FOR_A_FILE
    while not marker.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
