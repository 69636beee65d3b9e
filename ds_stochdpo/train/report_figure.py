"""The figure of the report: six small charts over optimizer steps. Entry: `draw_figure`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

INK, GREY, GRID = "#1f2933", "#6b7785", "#e4e8ec"
BLUE, ORANGE, GREEN, PURPLE = "#2563a8", "#c8551b", "#2e7d4f", "#7a4fa3"
# With a margin of 0 the sigmoid loss is log 2; every run from the reference policy starts there.
LOSS_AT_ZERO_MARGIN = math.log(2.0)
SIGMOID_LOSSES = ("sigmoid", "robust")

Line = dict[str, Any]


def draw_figure(train: Sequence[Line], evaluations: Sequence[Line], settings: dict[str, Any]) -> Figure:
    """Loss, margin, accuracy, tokens, step time and gradient norm over optimizer steps.

    Args:
        train: Training lines of metrics.jsonl.
        evaluations: Evaluation lines, keys prefixed eval_.
        settings: Settings of the run; loss_type decides whether log 2 is marked.

    Returns:
        A figure with an Agg canvas, ready to be saved; no global matplotlib state is touched.
    """
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, wspace=0.03, hspace=0.05)
    figure = Figure(figsize=(12.0, 6.6), dpi=150, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 3)
    _draw_learning(axes[0], train, evaluations, settings)
    _draw_tokens(axes[1, 0], train)
    _draw_step_time(axes[1, 1], train)
    _start(axes[1, 2], "Gradient norm", "before clipping")
    _line(axes[1, 2], train, "grad_norm", BLUE, "")
    _from_zero(axes[1, 2])
    return figure


def _draw_learning(row: Any, train: Sequence[Line], evaluations: Sequence[Line], settings: dict[str, Any]) -> None:
    loss, margin, accuracy = row
    _start(loss, "Loss", "")
    if settings.get("loss_type", "sigmoid") in SIGMOID_LOSSES and not settings.get("label_smoothing"):
        loss.axhline(LOSS_AT_ZERO_MARGIN, color=GREY, linewidth=1, linestyle=(0, (2, 3)), label="margin 0: log 2")
    _start(margin, "Reward margin", "chosen minus rejected")
    margin.axhline(0.0, color=GREY, linewidth=1, linestyle=(0, (2, 3)))
    _start(accuracy, "Reward accuracy", "share with margin above 0")
    for axes, key in ((loss, "loss"), (margin, "rewards/margins"), (accuracy, "rewards/accuracies")):
        _line(axes, train, key, BLUE, "training, sampled" if _is_sampled(settings) else "training")
        _line(axes, evaluations, f"eval_{key}", ORANGE, "held out, nothing sampled", marker="o")
    _legend(loss)
    accuracy.set_ylim(-0.03, 1.03)


def _is_sampled(settings: dict[str, Any]) -> bool:
    return settings.get("position_keep", 1.0) < 1 or settings.get("prefix_keep", 1.0) < 1


def _draw_tokens(axes: Axes, train: Sequence[Line]) -> None:
    _start(axes, "Tokens of a step", "all ranks")
    _line(axes, train, "tokens/full", GREY, "stock DPO would run", linestyle=(0, (4, 2)))
    _line(axes, train, "tokens/executed", BLUE, "run")
    _line(axes, train, "tokens/backward", PURPLE, "back-propagated")
    _line(axes, train, "tokens/scored", GREEN, "scored")
    _from_zero(axes, headroom=1.4)
    _legend(axes, loc="upper left", ncols=2)


def _draw_step_time(axes: Axes, train: Sequence[Line]) -> None:
    _start(axes, "Step time", "seconds")
    _line(axes, train, "time/step_s", BLUE, "")
    _from_zero(axes)


def _start(axes: Axes, title: str, note: str) -> None:
    axes.set_title(title, loc="left", fontsize=11.5, fontweight="bold", color=INK, pad=8)
    if note:
        axes.set_title(note, loc="right", fontsize=8.5, color=GREY, pad=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#b8c0c8")
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=GREY, labelsize=8.5, length=3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("optimizer step", fontsize=8.5, color=GREY)


def _line(
    axes: Axes,
    lines: Sequence[Line],
    key: str,
    color: str,
    label: str,
    *,
    marker: str = "",
    linestyle: Any = "-",
) -> None:
    points = [(line["step"], line[key]) for line in lines if isinstance(line.get(key), (int, float))]
    if not points:
        return
    steps, values = zip(*points, strict=True)
    # A single point has no line to be seen by.
    shape = marker or ("o" if len(points) == 1 else "")
    axes.plot(
        steps,
        values,
        color=color,
        label=label,
        linewidth=1.8,
        marker=shape,
        markersize=5,
        linestyle=linestyle,
    )


def _from_zero(axes: Axes, headroom: float = 1.05) -> None:
    if axes.lines:
        axes.set_ylim(bottom=0.0, top=axes.get_ylim()[1] * headroom)


def _legend(axes: Axes, loc: Any = "best", ncols: int = 1) -> None:
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8, framealpha=0.85, edgecolor="none", labelcolor=INK, loc=loc, ncols=ncols)
