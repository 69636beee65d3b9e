"""Step counts, summaries, progress lines and the files of a run."""

import json
import logging
import math

import pytest

from ds_stochdpo import StochDPOConfig
from ds_stochdpo.pruning import full_draw
from ds_stochdpo.train.loop import _summary, plan_schedule
from ds_stochdpo.train.progress import Progress
from ds_stochdpo.train.record import RunRecord


def schedule(num_pairs, world_size=2, **settings):
    config = StochDPOConfig(per_device_train_batch_size=3, gradient_accumulation_steps=2, **settings)
    return plan_schedule(config, num_pairs=num_pairs, world_size=world_size)


@pytest.mark.parametrize(
    ("num_pairs", "settings", "per_epoch", "total", "warmup"),
    [
        (24, {}, 2, 2, 0),
        (25, {}, 3, 3, 0),
        (1, {}, 1, 1, 0),
        (25, {"num_train_epochs": 2.5}, 3, 8, 0),
        (25, {"max_steps": 7, "warmup_steps": 0.5}, 3, 7, 4),
        (25, {"max_steps": 7, "warmup_steps": 3}, 3, 7, 3),
        (25, {"max_steps": 10, "warmup_ratio": 0.1}, 3, 10, 1),
    ],
)
def test_schedule(num_pairs, settings, per_epoch, total, warmup):
    plan = schedule(num_pairs, **settings)
    assert plan.pairs_per_step == 12
    assert (plan.steps_per_epoch, plan.total_steps, plan.warmup_steps) == (per_epoch, total, warmup)


def test_summary_means_over_steps_taken_but_last_rate_and_largest_memory():
    taken = [
        {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 0.2, "memory/peak_gib": 3.0, "steps/skipped": 0.0},
        {"loss": 2.0, "grad_norm": 2.0, "learning_rate": 0.1, "memory/peak_gib": 1.0, "steps/skipped": 1.0},
    ]
    skipped = {**taken[0], "loss": math.nan, "grad_norm": math.nan, "memory/peak_gib": 4.0, "steps/skipped": 1.0}
    line = {"loss": 1.5, "grad_norm": 1.5, "learning_rate": 0.1, "memory/peak_gib": 4.0, "steps/skipped": 1.0}
    assert _summary([taken[0], skipped, taken[1]]) == line
    assert math.isnan(_summary([skipped])["loss"])


def test_progress_in_a_pipe_is_about_ten_lines_and_only_where_shown(caplog):
    caplog.set_level(logging.INFO)
    for is_shown in (True, False):
        with Progress("work", 200, "pair", is_shown=is_shown) as bar:
            for _ in range(200):
                bar.advance(1, "loss 0.5")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 11
    assert lines[-1].startswith("work: 200 of 200 pairs")
    assert lines[-1].endswith("loss 0.5")


def test_record_is_strict_json_and_silent_on_other_ranks(tmp_path):
    RunRecord(tmp_path / "none", writes=False).metrics({"step": 1})
    assert not (tmp_path / "none").exists()
    record = RunRecord(tmp_path, writes=True)
    record.metrics({"step": 1, "grad_norm": float("nan")})
    record.draws(1, [5], [full_draw(2, 1)])
    record.run({"finished": False})
    record.run({"finished": True})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "grad_norm": None}
    drawn = json.loads((tmp_path / "draws.jsonl").read_text())
    assert drawn["pair_id"] == 5
    assert drawn["chosen"] == {"prefix_tokens": 2, "positions": [0, 1], "weights": [1.0, 1.0]}
    assert json.loads((tmp_path / "run.json").read_text()) == {"finished": True}
    assert not list(tmp_path.glob("*.partial"))
