"""The checkpoint folders of a run: names, the newest complete one, room on the disk, rotation. Entry: `Checkpoints`."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from ds_stochdpo.engine import StochDPOEngine
from ds_stochdpo.engine.checkpoint import free_bytes, save_checkpoint, state_bytes
from ds_stochdpo.engine.completeness import discard, find_damage, folder_bytes
from ds_stochdpo.errors import CheckpointError

logger = logging.getLogger(__name__)

_NAME = re.compile(r"checkpoint-(\d+)")
_LEFTOVER = re.compile(r"\.checkpoint-\d+\.(partial|replaced|universal)")


def find_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder) of everything named like a checkpoint, complete or not, by step."""
    if not output_dir.is_dir():
        return []
    matches = [(match, path) for path in output_dir.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted((int(match[1]), path) for match, path in matches)


def leftovers(output_dir: Path) -> list[Path]:
    """Folders that a run left when it ended in the middle of a save."""
    if not output_dir.is_dir():
        return []
    return sorted(path for path in output_dir.iterdir() if _LEFTOVER.fullmatch(path.name))


def newest_complete(output_dir: Path) -> Path:
    """The checkpoint to continue from; damaged newer ones are named in the log.

    Raises:
        CheckpointError: If there is none, with what is wrong with each.
    """
    damaged: list[str] = []
    for _, folder in reversed(find_checkpoints(output_dir)):
        damage = find_damage(folder)
        if damage is None:
            for line in damaged:
                logger.warning("left out: %s; the last complete checkpoint is %s", line, folder)
            return folder
        damaged.append(f"{folder} ({damage})")
    raise CheckpointError(
        f"{output_dir} holds no complete checkpoint" + (f": {'; '.join(damaged)}." if damaged else ".")
    )


class Checkpoints:
    """Saves the checkpoints of a run and keeps the newest ones."""

    def __init__(self, output_dir: Path, *, limit: int | None, identity: dict[str, Any]) -> None:
        """Remember where and how many.

        Args:
            output_dir: The run's folder.
            limit: Complete checkpoints to keep; None: all.
            identity: What a run that continues is compared with, as `resume.run_identity` gives it.
        """
        self.output_dir, self.limit, self.identity = output_dir, limit, identity
        self.last_step: int | None = None
        """Step whose checkpoint is complete already, saved by this run or the one it continues from."""
        self._last_bytes: int | None = None

    def save(self, engine: StochDPOEngine, progress: dict[str, Any]) -> Path:
        """Save the present step, unless it is saved already; then remove what is beyond the limit. Collective.

        Args:
            engine: Engine between two optimizer steps.
            progress: What the training loop needs to go on, as plain JSON values; rank 0's counts.

        Returns:
            The complete checkpoint.

        Raises:
            CheckpointError: On every rank, if it cannot be written; older checkpoints are untouched.
        """
        folder = self.output_dir / f"checkpoint-{engine.step}"
        if engine.step == self.last_step:
            return folder
        engine.ranks.on_main(self._check_room, may_take_long=False)
        save_checkpoint(engine, folder, {**self.identity, "progress": progress})
        self.last_step = engine.step
        if engine.ranks.is_main:
            self._last_bytes = folder_bytes(folder)
            logger.info("saved %s (%s)", folder, _mib(self._last_bytes))
            self._rotate()
        return folder

    def warn_if_tight(self, engine: StochDPOEngine, num_saves: int) -> None:
        """Log a warning if the disk will not hold what the run is to save; rank 0 only.

        Args:
            engine: The engine, for the size of its state.
            num_saves: Checkpoints that the run will save.
        """
        # While a new one is written the old ones are all still there.
        kept = min(num_saves, self.limit + 1) if self.limit else num_saves
        needed, free = kept * state_bytes(engine), free_bytes(self.output_dir)
        if engine.ranks.is_main and needed > free:
            logger.warning(
                "%s has %s free, but %d checkpoints need about %s; lower save_total_limit, or free some space",
                self.output_dir, _mib(free), kept, _mib(needed),
            )  # fmt: skip

    def _check_room(self) -> None:
        """Only a size that was measured refuses to write; a prediction warns at the start."""
        free = free_bytes(self.output_dir)
        if self._last_bytes is not None and free < self._last_bytes:
            raise CheckpointError(
                f"no room for another checkpoint in {self.output_dir}: the last one has {self._last_bytes} bytes, "
                f"{free} bytes are free. Older checkpoints are untouched; free some space and resume from the newest."
            )

    def _rotate(self) -> None:
        if self.limit is None:
            return
        complete = [folder for _, folder in find_checkpoints(self.output_dir) if find_damage(folder) is None]
        for folder in complete[: -self.limit]:
            try:
                discard(folder)
            except OSError as error:
                logger.warning("%s cannot be removed (%s)", folder, error)


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
