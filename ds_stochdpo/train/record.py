"""What a run leaves behind besides the model: metrics.jsonl, draws.jsonl and run.json. Entry: `RunRecord`."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.errors import ConfigError
from ds_stochdpo.pruning.draws import PairDraw
from ds_stochdpo.train.trackers import TENSORBOARD_FOLDER, Tracker, log_line

logger = logging.getLogger(__name__)

RUN_FILES = ("metrics.jsonl", "run.json", "draws.jsonl", "report.html", "report.png")
"""Written while a run goes on. The model beside them is replaced by the export, not before."""
_WEIGHTS = "model*.safetensors"
_EVENTS = f"{TENSORBOARD_FOLDER}/events.out.tfevents.*"
_PACKAGES = ("ds_stochdpo", "torch", "deepspeed", "transformers", "datasets", "safetensors", "flash_attn")


def claim_output_dir(folder: Path, *, overwrite: bool, inputs: Mapping[str, str | None]) -> list[Path]:
    """Check that a run may write into `folder`, without touching it.

    Args:
        folder: The run's output_dir; need not exist.
        overwrite: Whether what an earlier run left there may go.
        inputs: What the run reads, by setting; a hub name is no path here.

    Returns:
        Files of an earlier run for `RunRecord` to remove. Its model is not among them: the export replaces that.

    Raises:
        ConfigError: If an earlier run's results are there and may not be overwritten, if the folder cannot be one, or
            if writing there would replace what the run reads.
    """
    for path in (folder, *folder.parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"output_dir is {folder}, but {path} is a file; name a folder.")
    for key, name in inputs.items():
        if name and Path(name).exists() and Path(name).resolve() == folder.resolve():
            raise ConfigError(
                f"output_dir is {folder}, which is {key} too; the trained model would replace it: name another folder."
            )
    stale = [folder / name for name in RUN_FILES if (folder / name).exists()] + sorted(folder.glob(_EVENTS))
    found = [*stale, *sorted(folder.glob(_WEIGHTS))]
    if found and not overwrite:
        raise ConfigError(
            f"output_dir is {folder}, which holds an earlier run ({found[0].name}); "
            "name another folder, or set overwrite_output_dir: true."
        )
    return stale


def claim_for(config: StochDPOConfig) -> list[Path]:
    """`claim_output_dir` for the run of these settings."""
    names = ("model_name_or_path", "ref_model_name_or_path", "dataset_name", "reference_cache_dir")
    inputs = {key: getattr(config, key) for key in names}
    return claim_output_dir(Path(config.output_dir), overwrite=config.overwrite_output_dir, inputs=inputs)


class RunRecord:
    """Writes the files of one run; does nothing on ranks that do not write.

    As a context manager it closes its trackers at the end.

    Attributes:
        trackers: They get every line of metrics.jsonl too.
    """

    def __init__(self, folder: Path, *, writes: bool, stale: Sequence[Path] = ()) -> None:
        """Start the files.

        Args:
            folder: The run's output_dir.
            writes: Whether this rank writes.
            stale: Files of an earlier run to remove first.
        """
        self.folder, self.writes = folder, writes
        self.trackers: list[Tracker] = []
        if not writes:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path in stale:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"output_dir is {folder}, which cannot be written: {error.strerror}.") from error
        if stale:
            logger.info("removed from %s: %s", folder, ", ".join(path.name for path in stale))
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
        partial = self.folder / "run.json.partial"
        partial.write_text(json.dumps(facts, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(partial, self.folder / "run.json")

    def _append(self, name: str, line: dict[str, Any]) -> None:
        if self.writes:
            with (self.folder / name).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")

    def _check_writable(self) -> None:
        free = shutil.disk_usage(self.folder).free
        if not os.access(self.folder, os.W_OK) or free == 0:
            raise ConfigError(f"output_dir is {self.folder}, where nothing can be written ({free} bytes free).")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def versions() -> dict[str, str]:
    """Installed versions of what decides a run's numbers."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Commit of the source tree this package runs from; None outside a git checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
