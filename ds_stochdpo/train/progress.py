"""Progress a person can follow: a bar on a terminal, plain lines in a file, nothing on other ranks."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from tqdm import tqdm

from ds_stochdpo.engine import Ranks

logger = logging.getLogger(__name__)

LINES_PER_BAR = 10
"""Plain lines of one bar when the output is not a terminal; a long one writes more."""
LONGEST_SILENCE_S = 60.0


def share_of(ranks: Ranks) -> str:
    """For the title of work that ranks share, of which rank 0 counts its own."""
    return f", rank 0 of {ranks.world_size}" if ranks.world_size > 1 else ""


class Progress:
    """Counts `total` units of work under a title. A terminal gets a tqdm bar, a pipe about ten lines."""

    def __init__(self, title: str, total: int, unit: str, *, is_shown: bool = True, done: int = 0) -> None:
        """Start counting.

        Args:
            title: What is being done.
            total: Units in all.
            unit: Name of a unit, as in "pair".
            is_shown: False on every rank but the one that speaks.
            done: Units finished by an earlier run.
        """
        self.title, self.total, self.unit = title, total, unit
        self.done = self._begun = done
        self._started = self._last_line = time.monotonic()
        self._next_line = done + total / LINES_PER_BAR
        is_terminal = sys.stderr.isatty()
        self._bar = (
            tqdm(total=total, initial=done, desc=title, unit=unit, dynamic_ncols=True)
            if is_shown and is_terminal
            else None
        )
        self._writes_lines = is_shown and not is_terminal
        if self._writes_lines:
            logger.info("%s: %d of %d %ss", title, done, total, unit)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.close()

    def _is_due(self) -> bool:
        is_late = time.monotonic() - self._last_line > LONGEST_SILENCE_S
        return self.done >= self._next_line or self.done >= self.total or is_late

    def advance(self, count: int = 1, note: str = "") -> None:
        """Record finished units.

        Args:
            count: Units finished since the last call.
            note: Latest numbers, shown beside the bar.
        """
        self.done += count
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(count)
        elif self._writes_lines and self._is_due():
            self._next_line = self.done + self.total / LINES_PER_BAR
            self._last_line = time.monotonic()
            seconds = self._last_line - self._started
            left = seconds / (self.done - self._begun) * (self.total - self.done)
            logger.info(
                "%s: %d of %d %ss, %.0f s, about %.0f s left%s",
                self.title, self.done, self.total, self.unit, seconds, left, f" | {note}" if note else "",
            )  # fmt: skip
