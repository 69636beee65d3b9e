"""The training run: settings, loop, record and report."""

from ds_stochdpo.train.loop import Schedule, TrainLoop, plan_schedule
from ds_stochdpo.train.report import write_report
from ds_stochdpo.train.run import run_training
from ds_stochdpo.train.settings import parse_settings

__all__ = [
    "Schedule",
    "TrainLoop",
    "parse_settings",
    "plan_schedule",
    "run_training",
    "write_report",
]
