"""Draw launch/three_cuts.svg: what each of the three cuts saves on one preference pair.

python launch/draw_cuts.py
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

OUTPUT = Path(__file__).resolve().parent / "three_cuts.svg"

WIDTH, HEIGHT = 960, 668
CELL, STEP = 23, 27
TOP, ROW = 92, 112
TEXT_X, PAIR_X, WEIGHT_X = 28, 318, 724
NUM_PROMPT, CHOSEN_LENGTH, REJECTED_LENGTH = 4, 9, 7
RESPONSE_X = PAIR_X + NUM_PROMPT * STEP + 26

# The card has its own light ground, so the figure reads the same on a white and on a dark page.
GROUND, EDGE, INK, GREY = "#fbfcfd", "#d5dbe1", "#1f2933", "#5c6875"
BACKWARD, FORWARD, SCORED, ABSENT = "#2563a8", "#b9d3ee", "#f2a33a", "#b4bdc6"


@dataclass(frozen=True)
class Branch:
    """One response in one row: how many tokens are run, which are scored, whether it has a gradient."""

    num_run: int
    scored: tuple[int, ...]
    has_gradient: bool = True


@dataclass(frozen=True)
class Cut:
    """One row: words at the left, the pair in the middle, the weight at the right."""

    title: str
    text: tuple[str, ...]
    chosen: Branch
    rejected: Branch
    weight: str
    weight_text: tuple[str, ...]
    shares_prompt: bool = True


def every(length: int) -> tuple[int, ...]:
    """All positions of a response."""
    return tuple(range(1, length + 1))


CUTS = (
    Cut(
        "Stock DPO",
        ("Both branches are run, scored and", "back-propagated in full, the prompt twice."),
        Branch(9, every(9)),
        Branch(7, every(7)),
        "no weights",
        ("the exact log-ratio",),
        shares_prompt=False,
    ),
    Cut(
        "1  Positions: what is scored",
        ("Only sampled positions meet the output", "head, the same ones for the reference."),
        Branch(9, (2, 4, 6, 8)),
        Branch(7, (2, 4, 6)),
        "1 / q",
        ("on each scored position;", "q: its probability"),
    ),
    Cut(
        "2  Prefixes: what is run",
        ("Only a sampled prefix of length K", "of each response is run at all."),
        Branch(5, every(5)),
        Branch(4, every(4)),
        "1 / P(K \u2265 t)",
        ("on position t", "of the prefix"),
    ),
    Cut(
        "3  Branches: what has a gradient",
        ("Both responses are run, one is kept", "for the backward pass."),
        Branch(9, every(9)),
        Branch(7, every(7), has_gradient=False),
        "1 / p",
        ("on the kept branch;", "p: its probability"),
    ),
    Cut(
        "All three",
        ("Three independent draws, each made", "before the work that it saves."),
        Branch(5, (2, 4)),
        Branch(4, (2, 4), has_gradient=False),
        "1 / (q P(K \u2265 t))",
        ("on each scored position,", "1 / p on the kept branch"),
    ),
)


def text(x: float, y: float, words: str, *, size: float = 13, color: str = INK, bold: bool = False) -> str:
    """One line of text with its left end at x."""
    weight = ' font-weight="700"' if bold else ""
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}"{weight}>{escape(words)}</text>'


def cell(x: float, y: float, *, is_run: bool, has_gradient: bool, is_scored: bool) -> str:
    """One token."""
    if not is_run:
        shape = f'fill="none" stroke="{ABSENT}" stroke-width="1.3" stroke-dasharray="3 3"'
    else:
        shape = f'fill="{BACKWARD if has_gradient else FORWARD}"'
    drawn = f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" rx="4" {shape}/>'
    if is_scored:
        middle = CELL / 2
        drawn += f'<circle cx="{x + middle}" cy="{y + middle}" r="5.5" fill="{SCORED}" stroke="{GROUND}"/>'
    return drawn


def branch(y: float, length: int, drawn: Branch) -> list[str]:
    """The response tokens of one branch."""
    return [
        cell(
            RESPONSE_X + (t - 1) * STEP,
            y,
            is_run=t <= drawn.num_run,
            has_gradient=drawn.has_gradient,
            is_scored=t in drawn.scored,
        )
        for t in every(length)
    ]


def prompt(y: float) -> list[str]:
    """The prompt tokens; the kept branch gives them their gradient."""
    return [cell(PAIR_X + i * STEP, y, is_run=True, has_gradient=True, is_scored=False) for i in range(NUM_PROMPT)]


def row(top: float, cut: Cut) -> list[str]:
    """One cut."""
    upper, lower = top + 12, top + 12 + STEP + 12
    middle = (upper + lower) / 2
    parts = [text(TEXT_X, top + 30, cut.title, size=15, bold=True)]
    parts += [text(TEXT_X, top + 52 + 18 * i, words, color=GREY) for i, words in enumerate(cut.text)]
    if cut.shares_prompt:
        parts += prompt(middle)
        fork_x, half = PAIR_X + NUM_PROMPT * STEP - 2, CELL / 2
        for y in (upper, lower):
            start, end = middle + half, y + half
            bend = f"M{fork_x} {start} C{fork_x + 14} {start} {fork_x + 10} {end} {fork_x + 24} {end}"
            parts.append(f'<path d="{bend}" fill="none" stroke="{GREY}" stroke-width="1.4"/>')
    else:
        parts += prompt(upper) + prompt(lower)
    parts += branch(upper, CHOSEN_LENGTH, cut.chosen) + branch(lower, REJECTED_LENGTH, cut.rejected)
    parts.append(text(WEIGHT_X, top + 30, cut.weight, size=16, bold=True))
    parts += [text(WEIGHT_X, top + 52 + 18 * i, words, color=GREY) for i, words in enumerate(cut.weight_text)]
    return parts


def legend(y: float) -> list[str]:
    """What the four marks mean."""
    parts = []
    x = float(TEXT_X)
    for words, width, marks in (
        ("run and back-propagated", 208, {"is_run": True, "has_gradient": True, "is_scored": False}),
        ("run forward only", 154, {"is_run": True, "has_gradient": False, "is_scored": False}),
        ("not run", 96, {"is_run": False, "has_gradient": False, "is_scored": False}),
    ):
        parts += [cell(x, y, **marks), text(x + CELL + 8, y + 16, words)]
        x += width
    parts.append(f'<circle cx="{x + 8}" cy="{y + CELL / 2}" r="6" fill="{SCORED}"/>')
    parts.append(text(x + 22, y + 16, "scored: its log-prob enters the loss"))
    return parts


def draw() -> str:
    """The whole figure as SVG text."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img" '
        'font-family="DejaVu Sans, Verdana, Segoe UI, Helvetica, sans-serif">',
        "<title>Three cuts on one preference pair: positions, prefixes, branches</title>",
        f'<rect x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="12" fill="{GROUND}" stroke="{EDGE}"/>',
        *legend(22),
        text(PAIR_X, 80, "prompt", color=GREY),
        text(RESPONSE_X, 80, "chosen response above, rejected below", color=GREY),
        text(WEIGHT_X, 80, "weight", color=GREY),
    ]
    for i, cut in enumerate(CUTS):
        top = TOP + i * ROW
        parts.append(f'<line x1="{TEXT_X}" x2="{WIDTH - TEXT_X}" y1="{top}" y2="{top}" stroke="{EDGE}"/>')
        parts += row(top + 4, cut)
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    OUTPUT.write_text(draw(), encoding="utf-8")
    print(f"wrote {OUTPUT}")
