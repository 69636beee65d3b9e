"""Names of columns: renaming them, and showing them in messages.

Floor: data. Entry: `renamed_rows`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ds_stochdpo.checks import OPTIONAL_COLUMNS
from ds_stochdpo.data.tally import printable
from ds_stochdpo.errors import ConfigError

Row = tuple[Any, str]
"""A row of a file, which may be any JSON value, and its place."""

_NAMES_SHOWN = 20


def renamed_rows(rows: Iterable[Row], mapping: Mapping[str, str]) -> Iterator[Row]:
    """Rows with their columns renamed, all at once, so that two columns may swap their names.

    The columns that every pair needs must be in the first row, the optional ones in any of those read. A column whose
    name is given to another one stays under a name that no layout knows.

    Args:
        rows: Rows and places; rows that are no objects pass.
        mapping: Their columns to our names.

    Raises:
        ConfigError: If a column is missing, with the columns that are there.
    """
    required = [column for column, name in mapping.items() if name not in OPTIONAL_COLUMNS]
    columns: dict[str, None] = {}
    for row, place in rows:
        if isinstance(row, dict):
            if not columns:
                _check_columns(required, row, place)
            columns.update(dict.fromkeys(row))
            yield _renamed(row, mapping), place
        else:
            yield row, place
    if columns:
        _check_columns(mapping, columns, "the whole set")


def _renamed(row: dict[str, Any], mapping: Mapping[str, str]) -> dict[str, Any]:
    taken = {mapping[column] for column in row if column in mapping}
    renamed = {}
    for column, value in row.items():
        if column in mapping:
            renamed[mapping[column]] = value
        else:
            renamed[f"{column} (replaced)" if column in taken else column] = value
    return renamed


def _check_columns(wanted: Iterable[str], found: Iterable[str], place: str) -> None:
    found = list(found)
    missing = [column for column in wanted if column not in found]
    if missing:
        raise ConfigError(
            f"column_mapping names {', '.join(map(repr, missing))}, but {place} has the columns "
            f"{column_list(found)}; write their column, then ours: question=prompt,good=chosen,bad=rejected."
        )


def column_list(names: Iterable[str]) -> str:
    """Names for a message: printable, and not too many."""
    shown = [printable(name) for name in names]
    more = f" and {len(shown) - _NAMES_SHOWN} more" if len(shown) > _NAMES_SHOWN else ""
    return ", ".join(shown[:_NAMES_SHOWN]) + more or "none"
