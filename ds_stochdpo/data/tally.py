"""Why rows are left out, and the counts that a run prints and records.

Floor: data. Entry: `Tally`; a stage that cannot use a row raises `BadRowError` and the loop counts it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# Enough to find the pattern in a file without flooding the run record.
FIRST_LINES_KEPT = 5


class BadRowError(Exception):
    """One row cannot become a pair; the row is dropped and counted, the run goes on.

    Args:
        reason: Key of the count; the same words for every row with this fault.
        detail: What this row holds, for the message.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


@dataclass
class Tally:
    """Counts of one pass over the rows.

    Attributes:
        counts: `read`, `used`, then `dropped/<reason>`, `truncated/<reason>` and `noted/<what>`.
        first_lines: First places ("file:line") of each dropped, truncated or noted key.
        first_details: What the first row of each dropped key held.
    """

    counts: dict[str, int] = field(default_factory=lambda: {"read": 0, "used": 0})
    first_lines: dict[str, list[str]] = field(default_factory=dict)
    first_details: dict[str, str] = field(default_factory=dict)

    def add(self, key: str, source: str, detail: str = "") -> None:
        """Count `key` once more and remember the place if it is among the first."""
        self.counts[key] = self.counts.get(key, 0) + 1
        lines = self.first_lines.setdefault(key, [])
        if len(lines) < FIRST_LINES_KEPT:
            lines.append(source)
        if detail:
            self.first_details.setdefault(key, detail)

    def drop(self, bad: BadRowError, source: str) -> None:
        """Count a dropped row."""
        self.add(f"dropped/{bad.reason}", source, bad.detail)

    def describe(self, prefix: str) -> list[str]:
        """One phrase for each key under `prefix`: count, reason, first places, what the first row held."""
        phrases = []
        for key, count in self.counts.items():
            if key.startswith(prefix):
                detail = self.first_details.get(key)
                held = f" ({detail})" if detail else ""
                phrases.append(f"{count} {key.removeprefix(prefix)}: {', '.join(self.first_lines[key])}{held}")
        return phrases
