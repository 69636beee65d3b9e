"""The HTML page of the report, one file with nothing to load. Entry: `build_page`.

Read of run.json: settings, versions, and data, which is {split: {..., counts: {what: rows}}}. Every other top-level
value is shown as it is. Keys that are missing leave their part out.
"""

from __future__ import annotations

import base64
import dataclasses
import html
import json
import statistics
from collections.abc import Iterable
from typing import Any

from ds_stochdpo.config import StochDPOConfig

Line = dict[str, Any]
Row = tuple[str, ...]

EVALUATION_ROWS = (
    ("rewards/accuracies", "accuracy: share of pairs with margin above 0"),
    ("rewards/margins", "reward margin: chosen minus rejected"),
    ("loss", "loss"),
    ("rewards/chosen", "reward of the chosen response"),
    ("rewards/rejected", "reward of the rejected response"),
    ("logps/chosen", "log-prob of the chosen response, nats"),
    ("logps/rejected", "log-prob of the rejected response, nats"),
)

ROUNDING = 1e-4
"""Margins below it are those of a policy that is its reference, run in another packing."""
STYLE = """
:root { color-scheme: light; }
body { margin: 0; background: #f4f6f8; color: #1f2933;
       font: 15px/1.55 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 26px; margin: 0 0 4px; }
h2 { font-size: 18px; margin: 36px 0 10px; }
.sub { color: #5c6875; margin: 0 0 24px; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(230px, 1fr)); gap: 12px; }
.tile, .card { background: #fff; border: 1px solid #dde2e7; border-radius: 8px; padding: 14px 16px; }
.tile b { display: block; font-size: 22px; font-variant-numeric: tabular-nums; }
.tile span { color: #5c6875; font-size: 13px; }
.card img { width: 100%; height: auto; display: block; }
.card p { margin: 0 0 10px; }
.card p:last-child { margin: 0; }
table { border-collapse: collapse; width: 100%; background: #fff; border: 1px solid #dde2e7; }
th, td { text-align: left; padding: 6px 14px; border-top: 1px solid #edf0f2; vertical-align: top; }
td { overflow-wrap: anywhere; }
td:first-child { white-space: nowrap; }
thead th { border-top: 0; color: #5c6875; font-weight: 600; font-size: 13px; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
td.help { color: #5c6875; font-size: 13px; }
details summary { cursor: pointer; color: #2563a8; margin: 10px 0; }
"""


def build_page(run: Line, train: list[Line], evaluations: list[Line], png: bytes) -> str:
    """The whole page.

    Args:
        run: Content of run.json.
        train: Training lines of metrics.jsonl.
        evaluations: Evaluation lines, keys prefixed eval_.
        png: The figure, embedded as base64.

    Returns:
        HTML text, UTF-8 declared.
    """
    settings = run.get("settings", {})
    title = html.escape(str(settings.get("output_dir", "run")))
    model, dataset = (html.escape(str(settings.get(key, ""))) for key in ("model_name_or_path", "dataset_name"))
    sentences = "".join(f"<p>{html.escape(sentence)}</p>" for sentence in describe_sampling(settings))
    image = base64.b64encode(png).decode("ascii")
    described = "Loss, margin, accuracy, tokens, step time and gradient norm over optimizer steps"
    parts = [
        f"<h1>DPO run: {title}</h1>",
        f'<p class="sub">{model} trained on {dataset}, {len(train)} logged steps</p>',
        _tiles(train, evaluations),
        "<h2>What was sampled, and what that does to the objective</h2>",
        f'<div class="card">{sentences}</div>',
        "<h2>Course of training</h2>",
        f'<div class="card"><img alt="{described}" src="data:image/png;base64,{image}"></div>',
        _evaluation_table(evaluations),
        _data_table(run.get("data", {})),
        _settings_table(settings),
        _run_table(run),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    body = "\n".join(part for part in parts if part)
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>\n'
        f"<body><main>\n{body}\n</main></body></html>\n"
    )


def describe_sampling(settings: dict[str, Any]) -> list[str]:
    """Plain sentences: what a run with these settings sampled and what that does to its objective."""
    position, prefix = settings.get("position_keep", 1.0), settings.get("prefix_keep", 1.0)
    sentences = []
    if position < 1:
        sentences.append(
            f"Scoring: on average {position:.0%} of the response positions were scored "
            f"({settings.get('position_sampler')}), each weighted by 1 over its probability of being scored."
        )
    if prefix < 1:
        weighting = "with weight 1 / P(K >= t), so that the part cut off is made up for on average."
        if settings.get("prefix_weighting") == "none":
            weighting = "without weights: the objective is a preference between prefixes, not whole responses."
        sentences.append(
            f"Execution: on average {prefix:.0%} of a response was run ({settings.get('prefix_sampler')}, "
            f"whole with probability of at least {settings.get('prefix_min_survival')}), {weighting}"
        )
    if position < 1 or prefix < 1:
        bound = "at most beta^2 / 8 times the variance of the margin"
        if settings.get("loss_type") == "hinge":
            bound = "not bounded by the variance of the margin, as the hinge has a kink"
        sentences.append(
            "The log-ratio of a response is then a noisy estimate, unbiased where the weights are used. "
            "The loss is a curved function of it, so the mean of the training loss lies at or above the "
            f"exact loss; the gap is {bound}. The training curves below are such estimates."
        )
    if settings.get("branch") == "single":
        sentences.append(
            "Backpropagation: both responses of a pair were run and one was back-propagated (the chosen "
            f"one with probability {settings.get('branch_prob')}), weighted by 1 over its probability. Given "
            "the sampled positions and prefixes the gradient keeps its mean; the price is noise."
        )
    if not sentences:
        return ["Nothing was sampled: all response tokens of both branches were run, scored, back-propagated."]
    sentences.append(
        "Gradient clipping and Adam are not linear, so weights after an update are not unbiased. "
        "Held-out numbers are exact: evaluation samples nothing."
    )
    return sentences


def _tiles(train: list[Line], evaluations: list[Line]) -> str:
    tiles = []
    if len(evaluations) > 1:
        for key, name in (("eval_rewards/accuracies", "accuracy"), ("eval_rewards/margins", "reward margin")):
            first, last = (_values([line], key) for line in (evaluations[0], evaluations[-1]))
            if first and last:
                tiles.append((f"{first[0]:.3g} \u2192 {last[0]:.3g}", f"held-out {name}, before and after"))
    times, peaks = _values(train, "time/step_s"), _values(train, "memory/peak_gib")
    if times:
        tiles.append((f"{statistics.median(times):.3g} s", "median step time"))
    if peaks:
        tiles.append((f"{max(peaks):.3g} GiB", "peak memory of a rank"))
    full = sum(_values(train, "tokens/full"))
    for key, name in (("executed", "run"), ("backward", "back-propagated"), ("scored", "scored")):
        total = sum(_values(train, f"tokens/{key}"))
        if full:
            tiles.append((f"{total / full:.0%}", f"{name}, of the tokens that stock DPO runs"))
        elif total:
            tiles.append((f"{total:,.0f}", f"tokens {name}"))
    cells = "".join(
        f'<div class="tile"><b>{html.escape(big)}</b><span>{html.escape(small)}</span></div>' for big, small in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _values(lines: list[Line], key: str) -> list[float]:
    return [line[key] for line in lines if isinstance(line.get(key), (int, float))]


def _evaluation_table(evaluations: list[Line]) -> str:
    if not evaluations:
        return ""
    first, last = evaluations[0], evaluations[-1]
    rows = []
    for key, name in EVALUATION_ROWS:
        before, after = first.get(f"eval_{key}"), last.get(f"eval_{key}")
        if before is None and after is None:
            continue
        change = _number(after - before, signed=True) if before is not None and after is not None else ""
        rows.append((name, _number(before), _number(after), change))
    columns = ("Held-out pairs, nothing sampled", f"step {first['step']}", f"step {last['step']}", "change")
    table = "<h2>Before and after</h2>" + _table(columns, rows, numeric=(1, 2, 3))
    if first["step"] == 0 and abs(first.get("eval_rewards/margins", 1.0)) < ROUNDING:
        table += (
            "<p>Before training, policy and reference are the same: margins are 0 up to rounding, and the accuracy "
            "says nothing.</p>"
        )
    return table


def _data_table(data: dict[str, Any]) -> str:
    splits = {split: {"files": facts.get("files", []), **facts.get("counts", {})} for split, facts in data.items()}
    names = list(dict.fromkeys(name for counts in splits.values() for name in counts))
    if not names:
        return ""
    # A reason that another split has and this one has not: no row of this split.
    rows = [(name, *(_number(counts.get(name, 0)) for counts in splits.values())) for name in names]
    numeric = tuple(range(1, len(splits) + 1))
    return "<h2>Rows read, dropped and truncated</h2>" + _table(("", *splits), rows, numeric=numeric)


def _settings_table(settings: dict[str, Any]) -> str:
    if not settings:
        return ""
    fields = {f.name: f for f in dataclasses.fields(StochDPOConfig)}
    chosen: list[Row] = []
    default: list[Row] = []
    for key, value in settings.items():
        row = (
            key,
            value if isinstance(value, str) else json.dumps(value),
            fields[key].metadata.get("help", "") if key in fields else "",
        )
        is_default = key in fields and str(fields[key].default) == str(value)
        (default if is_default else chosen).append(row)
    columns = ("setting", "value", "meaning")
    more = f"<details><summary>{len(default)} settings at their default</summary>"
    more += _table(columns, default, help_column=2) + "</details>"
    return "<h2>Settings</h2>" + _table(columns, chosen, help_column=2) + (more if default else "")


def _run_table(run: Line) -> str:
    rows: list[Row] = [
        (key, value if isinstance(value, str) else json.dumps(value))
        for key, value in run.items()
        if key not in ("settings", "versions", "data")
    ]
    rows += [(f"version of {name}", str(version)) for name, version in run.get("versions", {}).items()]
    return "<h2>Run</h2>" + _table(("what", "value"), rows) if rows else ""


def _table(columns: Row, rows: Iterable[Row], *, numeric: tuple[int, ...] = (), help_column: int = -1) -> str:
    def cell(tag: str, index: int, text: str) -> str:
        kind = ' class="n"' if index in numeric else ""
        if tag == "td" and index == help_column:
            kind = ' class="help"'
        return f"<{tag}{kind}>{html.escape(text)}</{tag}>"

    head = "".join(cell("th", i, text) for i, text in enumerate(columns))
    body = "\n".join("<tr>" + "".join(cell("td", i, text) for i, text in enumerate(row)) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"


def _number(value: Any, *, signed: bool = False) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    if isinstance(value, int):
        return f"{value:+,}" if signed else f"{value:,}"
    # Adding 0.0 turns -0.0 into 0.0.
    rounded = round(value, 4) + 0.0
    return f"{rounded:+.4f}" if signed else f"{rounded:.4f}"
