"""report.png and report.html of a run, made from its run.json and metrics.jsonl. Entry: `write_report`."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any, NoReturn

from ds_stochdpo.errors import StochDPOError
from ds_stochdpo.train.report_figure import draw_figure
from ds_stochdpo.train.report_page import build_page

Line = dict[str, Any]


def write_report(output_dir: Path) -> None:
    """Write report.png and the self-contained report.html into `output_dir`.

    Args:
        output_dir: Folder of a run with run.json and metrics.jsonl.

    Raises:
        StochDPOError: If one of the two is missing, or is not strict JSON; names file and line.
    """
    run = _parse(_read(output_dir / "run.json"), "run.json")
    train, evaluations = read_metrics(output_dir / "metrics.jsonl")
    figure = draw_figure(train, evaluations, run.get("settings", {}))
    png = io.BytesIO()
    figure.savefig(png, format="png")
    _replace(output_dir / "report.png", png.getvalue())
    page = build_page(run, train, evaluations, png.getvalue())
    _replace(output_dir / "report.html", page.encode("utf-8"))


def read_metrics(path: Path) -> tuple[list[Line], list[Line]]:
    """Training and evaluation lines of a metrics.jsonl.

    Args:
        path: One strict JSON object a line. The unfinished last line of a killed run is passed over.

    Returns:
        Training lines, and evaluation lines (those with an eval_ key); each ordered by step.

    Raises:
        StochDPOError: If the file is missing, or a line is not a strict JSON object with a step.
    """
    text = _read(path)
    whole, _, _unfinished = text.rpartition("\n")
    lines = [
        _parse(line, f"{path.name} line {number}")
        for number, line in enumerate(whole.split("\n"), start=1)
        if line.strip()
    ]
    for number, line in enumerate(lines, start=1):
        if not isinstance(line.get("step"), int):
            step = line.get("step")
            raise StochDPOError(f"{path.name}: object {number} has step {step!r}; it must be a whole number.")
    lines.sort(key=lambda line: line["step"])
    evaluations = [line for line in lines if any(key.startswith("eval_") for key in line)]
    train = [line for line in lines if "loss" in line]
    return train, evaluations


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise StochDPOError(f"{path} is missing; a report needs run.json and metrics.jsonl of a run.") from None


def _parse(text: str, place: str) -> Line:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no JSON number")

    try:
        parsed = json.loads(text, parse_constant=refuse)
    except ValueError as error:
        raise StochDPOError(f"{place} is not strict JSON: {error}.") from None
    if not isinstance(parsed, dict):
        raise StochDPOError(f"{place} holds a {type(parsed).__name__}; it must be a JSON object.")
    return parsed


def _replace(path: Path, content: bytes) -> None:
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)
