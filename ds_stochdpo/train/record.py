"""What a run leaves behind besides the model: metrics.jsonl, draws.jsonl and run.json. Entry: `RunRecord`."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ds_stochdpo.engine.completeness import flush_file, write_json
from ds_stochdpo.errors import ConfigError, StochDPOError
from ds_stochdpo.pruning.draws import PairDraw
from ds_stochdpo.train.output_dir import remove
from ds_stochdpo.train.trackers import Tracker, log_line

logger = logging.getLogger(__name__)


class RunRecord:
    """Writes the files of one run; does nothing on ranks that do not write.

    As a context manager it closes its trackers at the end.

    Attributes:
        trackers: They get every line of metrics.jsonl too.
        lines: Complete lines of each file of lines.
        earlier: run.json of the run that is continued.
    """

    def __init__(self, folder: Path, *, writes: bool, stale: Sequence[Path] = ()) -> None:
        """Start the files, or go on with those that are there.

        Args:
            folder: The run's output_dir.
            writes: Whether this rank writes.
            stale: Files and checkpoints of an earlier run to remove first.
        """
        self.folder, self.writes = folder, writes
        self.trackers: list[Tracker] = []
        self.lines: dict[str, int] = {}
        self.earlier: dict[str, Any] = {}
        if not writes:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            remove(stale)
            self.earlier = _read_json(folder / "run.json")
        except OSError as error:
            raise ConfigError(f"output_dir is {folder}, which cannot be written: {error.strerror or error}.") from error
        self._check_writable()

    def __enter__(self) -> RunRecord:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        for tracker in self.trackers:
            tracker.close(failed=kind is not None)

    def metrics(self, line: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl, where a number that is not finite is null, and send it to the trackers."""
        self._append("metrics.jsonl", {k: _finite(v) for k, v in line.items()})
        log_line(self.trackers, line)

    def draws(self, step: int, pair_ids: Sequence[int], draws: Sequence[PairDraw]) -> None:
        """Append the draws of one optimizer step to draws.jsonl, a line for each pair."""
        for pair_id, draw in zip(pair_ids, draws, strict=True):
            sides = {
                name: {
                    "prefix_tokens": d.prefix_tokens,
                    "positions": d.positions.tolist(),
                    "weights": d.weights.tolist(),
                }
                for name, d in (("chosen", draw.chosen), ("rejected", draw.rejected))
            }
            self._append(
                "draws.jsonl",
                {"step": step, "pair_id": pair_id, "kept": draw.kept, "kept_prob": draw.kept_prob, **sides},
            )

    def run(self, facts: dict[str, Any]) -> None:
        """Write run.json anew, whole or not at all."""
        if not self.writes:
            return
        with self._telling_what_failed("run.json"):
            write_json(self.folder / "run.json", facts)

    def cut(self, lines: Mapping[str, int]) -> None:
        """Keep only so many lines of each file: those that a checkpoint was saved after."""
        if self.writes:
            kept = {name: _cut_lines(self.folder / name, count) for name, count in lines.items()}
            self.lines = {name: count for name, count in kept.items() if count}

    def flush(self) -> dict[str, int]:
        """Force the lines written so far to the disk; their number in each file."""
        for name in self.lines:
            with self._telling_what_failed(name):
                flush_file(self.folder / name)
        return dict(self.lines)

    def _append(self, name: str, line: dict[str, Any]) -> None:
        if self.writes:
            with self._telling_what_failed(name), (self.folder / name).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")
            self.lines[name] = self.lines.get(name, 0) + 1

    @contextmanager
    def _telling_what_failed(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            free = shutil.disk_usage(self.folder).free
            raise StochDPOError(
                f"{self.folder / name} cannot be written: {error.strerror} ({free} bytes free); checkpoints that are "
                "complete stay so."
            ) from error

    def _check_writable(self) -> None:
        free = shutil.disk_usage(self.folder).free
        if not os.access(self.folder, os.W_OK) or free == 0:
            raise ConfigError(f"output_dir is {self.folder}, where nothing can be written ({free} bytes free).")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cut_lines(path: Path, count: int) -> int:
    """Keep the first `count` lines of a file; returns how many complete ones there are."""
    if not path.exists():
        return 0
    with path.open("rb+") as file:
        found = sum(1 for line in itertools.islice(file, count) if line.endswith(b"\n"))
    with path.open("rb+") as file:
        end = sum(len(line) for line in itertools.islice(file, found))
        file.truncate(end)
    if found < count:
        logger.warning("%s has %d lines, but the checkpoint was saved after %d", path, found, count)
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
