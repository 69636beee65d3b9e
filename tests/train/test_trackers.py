"""Trackers get the lines of metrics.jsonl, from the rank that writes, and are imported only if asked for.

The packages are stood in for by modules of the same name, so the tests need none of them.
"""

import json
import subprocess
import sys
import types

import pytest

from ds_stochdpo import ConfigError, StochDPOConfig
from ds_stochdpo.train.output_dir import claim_for
from ds_stochdpo.train.record import RunRecord
from ds_stochdpo.train.trackers import TensorBoardTracker, check_trackers, log_line, start_trackers

ALL = "tensorboard,wandb,comet_ml"


class Recorder:
    """Takes any call and writes it down; what a call returns does the same."""

    def __init__(self, calls, prefix=""):
        self._calls, self._prefix = calls, prefix

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args, **kwargs):
            self._calls.append((self._prefix + name, args, kwargs))
            return Recorder(self._calls, self._prefix + name + ".")

        return call


@pytest.fixture
def calls(monkeypatch):
    made = []
    modules = {"torch.utils.tensorboard": "SummaryWriter", "wandb": "init", "comet_ml": "start"}
    for module, entry in modules.items():
        stand_in = types.ModuleType(module)
        setattr(stand_in, entry, getattr(Recorder(made), entry))
        monkeypatch.setitem(sys.modules, module, stand_in)
    for variable in ("WANDB_PROJECT", "WANDB_NAME", "COMET_PROJECT_NAME"):
        monkeypatch.delenv(variable, raising=False)
    return made


def test_every_tracker_gets_the_line_and_the_settings(calls, tmp_path):
    config = StochDPOConfig(report_to=ALL, output_dir=str(tmp_path / "run"), beta=0.3)
    check_trackers(config)
    with RunRecord(tmp_path / "run", writes=True) as record:
        record.trackers = start_trackers(config, writes=True, first_step=3)
        record.metrics({"step": 3, "loss": 0.5, "grad_norm": float("nan"), "rewards/margins": 2})
        record.metrics({"step": 3, "eval_loss": 0.25})
    assert [call for call in calls if call[0] == "SummaryWriter.add_scalar"] == [
        ("SummaryWriter.add_scalar", ("loss", 0.5, 3), {}),
        ("SummaryWriter.add_scalar", ("rewards/margins", 2.0, 3), {}),
        ("SummaryWriter.add_scalar", ("eval_loss", 0.25, 3), {}),
    ]
    assert ("SummaryWriter", (), {"log_dir": str(tmp_path / "run" / "tensorboard"), "purge_step": 3}) in calls
    line = {"loss": 0.5, "rewards/margins": 2.0}
    assert ("init.log", (line,), {"step": 3}) in calls
    assert ("init.log", ({"eval_loss": 0.25},), {"step": 3}) in calls
    assert ("start.log_metrics", (line,), {"step": 3}) in calls
    (init,) = [call[2] for call in calls if call[0] == "init"]
    assert (init["project"], init["name"], init["config"]["beta"]) == ("ds_stochdpo", "run", 0.3)
    (parameters,) = [call[1][0] for call in calls if call[0] == "start.log_parameters"]
    assert parameters == config.to_dict()
    assert [call[0] for call in calls][-3:] == ["SummaryWriter.close", "init.finish", "start.end"]
    assert calls[-2][2] == {"exit_code": 0}
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_run_that_fails_is_marked(calls, tmp_path):
    config = StochDPOConfig(report_to="wandb,comet_ml", output_dir=str(tmp_path))

    def fail():
        with RunRecord(tmp_path, writes=True) as record:
            record.trackers = start_trackers(config, writes=True)
            raise ConfigError("stop")

    with pytest.raises(ConfigError, match="stop"):
        fail()
    assert ("init.finish", (), {"exit_code": 1}) in calls
    assert ("start.add_tag", ("failed",), {}) in calls


def test_the_environment_names_the_project(calls, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    start_trackers(StochDPOConfig(report_to="wandb", output_dir=str(tmp_path)), writes=True)
    assert calls[0][2]["project"] == "mine"


def test_other_ranks_start_none(calls):
    config = StochDPOConfig(report_to=ALL)
    check_trackers(config)
    assert start_trackers(config, writes=False) == []
    assert calls == []


@pytest.mark.parametrize(
    ("name", "module"),
    [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb"), ("comet_ml", "comet_ml")],
)
def test_a_tracker_that_is_not_installed_is_named(name, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"report_to is '{name}'.*pip install {name}"):
        check_trackers(StochDPOConfig(report_to=name))


def test_it_is_named_before_data_and_model_are_looked_at(tmp_path, monkeypatch):
    from ds_stochdpo.train import run_training

    monkeypatch.setitem(sys.modules, "wandb", None)
    config = StochDPOConfig(report_to="wandb", output_dir=str(tmp_path / "run"), model_name_or_path="nowhere")
    with pytest.raises(ConfigError, match="pip install wandb"):
        run_training(config)
    assert not (tmp_path / "run").exists()


def test_the_default_imports_no_tracker():
    code = (
        "import sys; from ds_stochdpo import StochDPOConfig; from ds_stochdpo.train import trackers; "
        "c = StochDPOConfig(); trackers.check_trackers(c); trackers.start_trackers(c, writes=True); "
        "print([m for m in ('tensorboard', 'torch.utils.tensorboard', 'wandb', 'comet_ml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_event_files_of_an_earlier_run_go_with_it(tmp_path):
    events = tmp_path / "tensorboard" / "events.out.tfevents.1.host"
    events.parent.mkdir()
    events.write_text("x")
    with pytest.raises(ConfigError, match="overwrite_output_dir"):
        claim_for(StochDPOConfig(output_dir=str(tmp_path)))
    claim = claim_for(StochDPOConfig(output_dir=str(tmp_path), overwrite_output_dir=True))
    RunRecord(tmp_path, writes=True, stale=claim.stale)
    assert not events.exists()


def test_real_tensorboard_events(tmp_path):
    from tensorboard.backend.event_processing import event_accumulator

    tracker = TensorBoardTracker(StochDPOConfig(output_dir=str(tmp_path)))
    log_line([tracker], {"step": 2, "loss": 0.5})
    tracker.close(failed=False)
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(2, 0.5)]


def test_lines_without_trackers_are_only_written(tmp_path):
    record = RunRecord(tmp_path, writes=True)
    record.metrics({"step": 1, "loss": 1.0})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 1.0}
