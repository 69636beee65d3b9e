"""The record as a picture and a page. Entry: `write_page`."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from benchmarking.record import table

INK, GREY, GRID = "#1f2933", "#6b7785", "#e4e8ec"
BLUE, ORANGE = "#2563a8", "#c8551b"
BAR = 0.62

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
img { width: 100%; } pre { overflow-x: auto; background: #f6f8fa; padding: 1rem; font-size: 12.5px; line-height: 1.45; }
p { color: #46525e; }
"""


def write_page(record: Mapping[str, Any], section_lines: Sequence[str], folder: Path) -> None:
    """Write bench.png and bench.html.

    Args:
        record: What `bench.py` writes as JSON.
        section_lines: Further measurements, as they are printed.
        folder: Where; must exist.
    """
    picture = folder / "bench.png"
    _draw(record["workloads"]).savefig(picture)
    machine, versions = record["machine"], record["versions"]
    facts = (
        f"{record['model_layers'] or 'all'} layers of {Path(record['settings']['model_name_or_path']).name}, "
        f"{record['dtype']}, {machine['device']}, {record['threads']} thread(s) on {machine['cores']} core(s), "
        f"{record['rounds']} rounds; torch {versions['torch']}, transformers {versions['transformers']}."
    )
    lines = [line for workload in record["workloads"] for line in (*table(workload), "")]
    page = (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>DPO steps side by side</title>"
        f"<style>{STYLE}</style><h1>DPO steps side by side</h1><p>{html.escape(facts)} Times are medians of rounds in "
        "which all variants take turns; where the work is drawn, the ratio is of means over the draws. Rings are what "
        "the count of floating-point operations predicts. Peak memory is beyond weights, gradients and optimizer "
        "state. Pruning buys time with noise in the gradient, which no bar here shows.</p>"
        f"<img alt='Times faster than the baseline, and peak memory' src='data:image/png;base64,{_encoded(picture)}'>"
        f"<pre>{html.escape(chr(10).join([*lines, *section_lines]))}</pre></html>"
    )
    (folder / "bench.html").write_text(page, encoding="utf-8")


def _encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def _draw(workloads: Sequence[Mapping[str, Any]]) -> Figure:
    """One row a batch: times faster than the baseline on the left, peak memory on the right where it was measured."""
    most = max(len(w["variants"]) for w in workloads)
    has_memory = any(row["memory"] for w in workloads for row in w["variants"])
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, wspace=0.02, hspace=0.06)
    size = (13.0, len(workloads) * (1.1 + 0.3 * most))
    figure = Figure(figsize=size, dpi=130, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(workloads), 1 + has_memory, squeeze=False, width_ratios=(1.6, 1)[: 1 + has_memory])
    for (speed, *memory), workload in zip(grid, workloads, strict=True):
        rows = list(reversed(workload["variants"]))
        titles = [row["title"] for row in rows]
        base = workload["baseline"]
        _draw_speed(speed, rows, {r["fast"]: r for r in workload["ratios"] if r["slow"] == base})
        speed.set_yticks(range(len(rows)), titles, fontsize=8.5, color=INK)
        facts = workload["workload"]
        first = "stock DPO" if base == "stock" else base
        heading = f"{facts['name']}, {facts['pairs']} pairs\ntimes faster than {first} (ring: by operations)"
        speed.set_title(heading, loc="left", fontsize=10.5, color=INK)
        for axes in memory:
            _draw_memory(axes, rows)
            axes.set_yticks([])
            axes.set_title(f"\npeak memory of a step, of that of {first}", loc="left", fontsize=10.5, color=INK)
    return figure


def _draw_speed(axes: Any, rows: Sequence[Mapping[str, Any]], ratios: Mapping[str, Mapping[str, Any]]) -> None:
    for place, row in enumerate(rows):
        measured = ratios.get(row["name"], {"faster": 1.0, "low": 1.0, "high": 1.0, "predicted": None})
        is_peer = row["work"] is None
        axes.barh(place, measured["faster"], BAR, color=ORANGE if is_peer else BLUE)
        axes.plot([measured["low"], measured["high"]], [place, place], color=INK, linewidth=1)
        if measured["predicted"]:
            axes.plot(measured["predicted"], place, marker="o", markersize=6, fillstyle="none", color=INK)
        # In a column of their own: beside a ring, a figure would seem to be the ring's.
        axes.annotate(f"{measured['faster']:.2f}x", (1, place), xycoords=("axes fraction", "data"), ha="right",
                      va="center", fontsize=8.5, color=INK)  # fmt: skip
    _finish(axes)


def _draw_memory(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    for place, row in enumerate(rows):
        if row["peak_of_baseline"] is None:
            continue
        axes.barh(place, row["peak_of_baseline"], BAR, color=BLUE)
        text = f"{row['peak_of_baseline']:.2f}x, {row['memory']['peak_mib']:.0f} MiB"
        axes.annotate(text, (row["peak_of_baseline"], place), xytext=(5, 0), textcoords="offset points", va="center",
                      fontsize=8.5, color=INK)  # fmt: skip
    _finish(axes)


def _finish(axes: Any) -> None:
    axes.axvline(1.0, color=GREY, linewidth=1, linestyle=(0, (2, 3)))
    axes.set_xlim(0, axes.get_xlim()[1] * 1.16)
    axes.grid(axis="x", color=GRID)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelcolor=INK, labelsize=8.5)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
