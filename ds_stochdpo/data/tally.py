"""Why rows are left out, and the counts that a run prints and records.

Floor: data. Entry: `Tally`; a stage that cannot use a row raises `BadRowError`, and the loop hands it to `Tally.drop`.
What happens for which reason stands in one table, `errors.ROW_FAULTS`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ds_stochdpo.errors import ROW_FAULTS, DataError

# Enough to find the pattern in a file without flooding the run record.
FIRST_LINES_KEPT = 5
DETAIL_LENGTH = 1500


def printable(text: str) -> str:
    """`text` with whatever would break a message or its line written as an escape."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


class BadRowError(Exception):
    """One row cannot become a pair; `Tally.drop` decides whether the run goes on.

    Args:
        reason: Key of `ROW_FAULTS` and of the count; the same words for every row with this fault.
        detail: What this row holds, for the message.
    """

    def __init__(self, reason: str, detail: str) -> None:
        detail = printable(detail[:DETAIL_LENGTH])
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


@dataclass(frozen=True)
class BrokenRow:
    """Stands for a line that could not be read, so that it is counted as read and dropped with its place.

    Attributes:
        reason: Key of `ROW_FAULTS`.
        detail: What was found, and what would be accepted.
    """

    reason: str
    detail: str


@dataclass
class Tally:
    """Counts of one pass over the rows.

    Attributes:
        data_errors: `stop` or `skip`, for the reasons that follow this setting.
        counts: `read`, `used`, then `dropped/<reason>`, `truncated/<reason>` and `noted/<what>`.
        first_lines: First places ("file:line") of each dropped, truncated or noted key.
        first_details: What the first row of each dropped key held.
    """

    data_errors: str = "stop"
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
        """Count a row that makes no pair; `read` already counts it.

        Raises:
            DataError: If the reason's policy is to stop.
        """
        policy, _ = ROW_FAULTS[bad.reason]
        if policy == "data_errors" and self.data_errors == "stop":
            raise DataError(f"{source}: {bad.detail}. To drop and count such rows set data_errors: skip.")
        if policy == "stop" or (policy == "first row" and self.counts["read"] == 1):
            raise DataError(f"{source}: {bad.detail}.")
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
