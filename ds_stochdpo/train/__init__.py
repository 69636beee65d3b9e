"""The training run: command line, loop, record and report."""

from ds_stochdpo.train.dry_run import dry_run
from ds_stochdpo.train.guard import Guard
from ds_stochdpo.train.launch_checks import check_launch
from ds_stochdpo.train.loop import Schedule, TrainLoop, plan_schedule
from ds_stochdpo.train.report import write_report
from ds_stochdpo.train.run import run_training
from ds_stochdpo.train.settings import parse_settings

__all__ = [
    "Guard",
    "Schedule",
    "TrainLoop",
    "check_launch",
    "dry_run",
    "parse_settings",
    "plan_schedule",
    "run_training",
    "write_report",
]
