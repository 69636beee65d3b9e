"""The lines of metrics.jsonl, sent to experiment trackers as well. Entry: `check_trackers`, `start_trackers`.

DeepSpeed's own monitors are not used: their `Train/Samples/train_loss` is what is differentiated, which here is the
surrogate and not the loss. A tracker's package is imported only if `report_to` names it.
"""

from __future__ import annotations

import importlib
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.errors import ConfigError

TENSORBOARD_FOLDER = "tensorboard"
"""Below output_dir."""
PROJECT = "ds_stochdpo"
"""Where a tracker that sorts runs into projects puts them, unless its environment variable says otherwise."""

_MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "comet_ml": "comet_ml"}
"""What has to import; torch's TensorBoard writer is part of torch, but imports the package `tensorboard`."""


class Tracker(ABC):
    """One experiment tracker, used by the rank that writes."""

    @abstractmethod
    def log(self, step: int, values: dict[str, float]) -> None:
        """Send the finite numbers of one line, under their names in metrics.jsonl."""

    @abstractmethod
    def close(self, *, failed: bool) -> None:
        """Send what is still buffered and end the run."""


class TensorBoardTracker(Tracker):
    """Event files below output_dir."""

    def __init__(self, config: StochDPOConfig, first_step: int | None = None) -> None:
        module = importlib.import_module(_MODULES["tensorboard"])
        folder = str(Path(config.output_dir) / TENSORBOARD_FOLDER)
        # What an earlier run showed for the steps that are now taken again disappears.
        self._writer = module.SummaryWriter(log_dir=folder, purge_step=first_step)
        rows = "\n".join(f"    {key}: {value}" for key, value in config.to_dict().items())
        self._writer.add_text("settings", rows)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Write one scalar a name."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        # Lines are steps apart: whoever watches should not wait for a buffer to fill.
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        """Close the event file."""
        self._writer.close()


class WandbTracker(Tracker):
    """A Weights & Biases run; account, mode and proxy come from its environment variables."""

    def __init__(self, config: StochDPOConfig, first_step: int | None = None) -> None:
        wandb: Any = importlib.import_module(_MODULES["wandb"])
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", Path(config.output_dir).name),
            dir=config.output_dir,
            config=config.to_dict(),
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log one line; an evaluation joins the training line of its step."""
        self._run.log(values, step=step)

    def close(self, *, failed: bool) -> None:
        """Finish the run, marked as failed if it was."""
        self._run.finish(exit_code=int(failed))


class CometTracker(Tracker):
    """A Comet experiment; account and mode come from its environment variables or its own settings file."""

    def __init__(self, config: StochDPOConfig, first_step: int | None = None) -> None:
        comet_ml: Any = importlib.import_module(_MODULES["comet_ml"])
        self._experiment = comet_ml.start(project=os.environ.get("COMET_PROJECT_NAME", PROJECT))
        self._experiment.set_name(Path(config.output_dir).name)
        self._experiment.log_parameters(config.to_dict())

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log one line."""
        self._experiment.log_metrics(values, step=step)

    def close(self, *, failed: bool) -> None:
        """End the experiment, tagged if it failed."""
        if failed:
            self._experiment.add_tag("failed")
        self._experiment.end()


_TRACKERS: dict[str, Callable[[StochDPOConfig, int | None], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "comet_ml": CometTracker,
}


def check_trackers(config: StochDPOConfig) -> None:
    """Raise ConfigError, naming the package, if a tracker of `report_to` cannot be imported."""
    for name in config.trackers:
        try:
            importlib.import_module(_MODULES[name])
        except ImportError as error:
            raise ConfigError(
                f"report_to is {config.report_to!r}, but {name} cannot be imported ({error}); "
                f"pip install {name}, or leave it out of report_to."
            ) from error


def start_trackers(config: StochDPOConfig, *, writes: bool, first_step: int | None = None) -> list[Tracker]:
    """Start the trackers that `report_to` names.

    Args:
        config: Settings; each tracker records all of them.
        writes: Whether this rank writes; the others get none.
        first_step: First step that is logged, if the run continues from a checkpoint.

    Returns:
        The trackers, in the order of `report_to`.
    """
    return [_TRACKERS[name](config, first_step) for name in config.trackers] if writes else []


def log_line(trackers: Iterable[Tracker], line: dict[str, Any]) -> None:
    """Send one line of metrics.jsonl to the trackers; what is not a finite number is left out."""
    values = {
        name: float(value)
        for name, value in line.items()
        if name != "step" and isinstance(value, (int, float)) and math.isfinite(value)
    }
    for tracker in trackers:
        tracker.log(int(line["step"]), values)
