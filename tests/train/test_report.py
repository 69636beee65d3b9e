"""The report of a run: what it reads, what it refuses, and what a reader finds on the page."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.errors import StochDPOError
from ds_stochdpo.train.report import read_metrics, write_report
from ds_stochdpo.train.report_page import describe_sampling

PRUNED = {"position_keep": 0.5, "prefix_keep": 0.75, "prefix_min_survival": 0.5, "branch": "single"}


def train_line(step: int, **changes: Any) -> dict[str, Any]:
    line = {
        "step": step, "epoch": step / 6, "loss": 0.69 - 0.01 * step, "rewards/chosen": 0.01 * step,
        "rewards/rejected": -0.02 * step, "rewards/margins": 0.03 * step, "rewards/accuracies": 0.75,
        "logps/chosen": -88.0, "logps/rejected": -90.0, "grad_norm": 11.5, "learning_rate": 1e-5,
        "tokens/executed": 900, "tokens/scored": 250, "tokens/backward": 500, "tokens/full": 1500,
        "time/step_s": 10.0 + step, "memory/peak_gib": 3.25,
    }  # fmt: skip
    return line | changes


def eval_line(step: int, accuracy: float, margin: float) -> dict[str, Any]:
    return {
        "step": step,
        "eval_loss": 0.6931,
        "eval_rewards/accuracies": accuracy,
        "eval_rewards/margins": margin,
    }


def make_run(folder: Path, lines: list[dict[str, Any]], **settings: Any) -> Path:
    data = {"train": {"files": ["a.jsonl", "b.jsonl"], "counts": {"dropped/both responses <equal>": 7, "used": 24}}}
    run = {
        "settings": StochDPOConfig(**settings).to_dict(),
        "versions": {"torch": "2.13.0"},
        "world_size": 2,
        "data": data,
    }
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def cells(page: str) -> list[str]:
    return re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", page)


def test_report_holds_the_numbers_of_the_run(tmp_path: Path) -> None:
    lines = [eval_line(0, 0.0, 0.0), *(train_line(s) for s in (1, 2, 3)), eval_line(3, 0.6875, 0.1432)]
    write_report(make_run(tmp_path, lines, output_dir="outputs/this-run", learning_rate=3e-6, **PRUNED))
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    row = cells(page)
    at = row.index("accuracy: share of pairs with margin above 0")
    assert row[at + 1 : at + 4] == ["0.0000", "0.6875", "+0.6875"]
    assert row[row.index("dropped/both responses &lt;equal&gt;") + 1] == "7"
    assert row[row.index("files") + 1] == "a.jsonl, b.jsonl"
    assert row[row.index("learning_rate") + 1] == "3e-06"
    assert row[row.index("version of torch") + 1] == "2.13.0"
    # Median of 11, 12 and 13 s; 900, 500 and 250 of 1,500 tokens.
    for big in ("12 s", "60%", "33%", "17%", "3.25 GiB", "0 \u2192 0.688"):
        assert f"<b>{big}</b>" in page
    assert "outputs/this-run" in page
    assert "1 / P(K &gt;= t)" in page


def test_figure_is_a_picture_and_the_page_loads_nothing(tmp_path: Path) -> None:
    write_report(make_run(tmp_path, [train_line(1), train_line(2)]))
    pixels = imread(tmp_path / "report.png")
    assert pixels.shape[0] > 500
    assert pixels.shape[1] > 1000
    assert pixels.std() > 0.01
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    sources = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert len(sources) == 1
    embedded = base64.b64decode(sources[0].removeprefix("data:image/png;base64,"))
    assert embedded == (tmp_path / "report.png").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "metrics.jsonl",
        "report.html",
        "report.png",
        "run.json",
    ]


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_does_not_have_are_refused(tmp_path: Path, constant: str) -> None:
    make_run(tmp_path, [train_line(1)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": 2, "loss": {constant}}}\n')
    with pytest.raises(StochDPOError, match=f"metrics.jsonl line 2 is not strict JSON: {constant}"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1, 2]", "holds a list"),
        ('{"loss": 0.5}', "step None"),
        ('{"step": 1,, "loss": 1}', "is not strict JSON"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    make_run(tmp_path, [])
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    with pytest.raises(StochDPOError, match=message):
        write_report(tmp_path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StochDPOError, match=r"run\.json is missing"):
        write_report(tmp_path)


def test_unfinished_last_line_of_a_killed_run_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(train_line(1)) + "\n" + json.dumps(train_line(2))[:40])
    train, evaluations = read_metrics(path)
    assert [line["step"] for line in train] == [1]
    assert evaluations == []


def test_lines_are_told_apart_and_ordered(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [train_line(2), eval_line(2, 1.0, 0.1), train_line(1), eval_line(0, 0.0, 0.0)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    train, evaluations = read_metrics(path)
    assert [line["step"] for line in train] == [1, 2]
    assert [line["step"] for line in evaluations] == [0, 2]


def test_a_run_without_lines_or_with_nulls_still_has_a_report(tmp_path: Path) -> None:
    for lines in ([], [train_line(1, grad_norm=None) | {"memory/peak_gib": None}]):
        write_report(make_run(tmp_path, lines))
        assert imread(tmp_path / "report.png").size > 0
        assert "peak memory" not in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_what_was_sampled_is_said() -> None:
    exact = describe_sampling(StochDPOConfig().to_dict())
    assert len(exact) == 1
    assert exact[0].startswith("Nothing was sampled")
    pruned = " ".join(describe_sampling(StochDPOConfig(**PRUNED).to_dict()))
    for part in (
        "50% of the response positions",
        "75% of a response",
        "at most beta^2 / 8",
        "the price is noise",
    ):
        assert part in pruned
    only_branch = " ".join(describe_sampling(StochDPOConfig(branch="single").to_dict()))
    assert "noisy estimate" not in only_branch
    hinge = " ".join(describe_sampling(StochDPOConfig(position_keep=0.5, loss_type="hinge").to_dict()))
    assert "not bounded" in hinge
    unweighted = StochDPOConfig(prefix_keep=0.5, prefix_weighting="none").to_dict()
    assert "preference between prefixes" in " ".join(describe_sampling(unweighted))
