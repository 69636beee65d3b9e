"""Rows of JSON lines and JSON arrays, each with the line where it begins.

Floor: data. Entry: `json_rows`.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ds_stochdpo.data.columns import Row
from ds_stochdpo.data.tally import BrokenRow, printable
from ds_stochdpo.errors import DataError

_JSON_SPACE = " \t\r\n"
_MAX_DEPTH = 100
_SPACES = re.compile(f"[{_JSON_SPACE}]*")


def json_rows(path: Path) -> Iterator[Row]:
    """Rows of JSON lines or of one array, whichever the first character says; the suffix tells only gzip.

    A byte order mark, blank lines and either line end are no part of a row; a line that is no row becomes a
    `BrokenRow`.

    Raises:
        DataError: If the file cannot be read, or is an array with a fault: nothing marks where its next row begins.
    """
    place = printable(str(path))
    try:
        with gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb") as handle:
            yield from _json_values(handle, place)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{place}: cannot be read: {error}.") from error


def _json_values(handle: gzip.GzipFile | io.BufferedReader, place: str) -> Iterator[Row]:
    started = False
    # Binary lines end at \n alone, so Unicode line separators inside strings break nothing.
    for number, raw in enumerate(_whole_lines(handle), start=1):
        if isinstance(raw, BrokenRow):
            yield raw, f"{place}:{number}"
            return
        value: Any = _decode(raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw)
        if isinstance(value, str):
            text = value.rstrip(_JSON_SPACE)
            if not text:
                continue
            if not started and text.lstrip(_JSON_SPACE).startswith("["):
                yield from _array_rows(place, raw + handle.read(), number)
                return
            value = _parse(text)
        started = True
        yield value, f"{place}:{number}"


def _whole_lines(handle: gzip.GzipFile | io.BufferedReader) -> Iterator[bytes | BrokenRow]:
    try:
        yield from handle
    except EOFError:
        yield BrokenRow("file cut off", "the compressed file ends early, and rows after this line are lost")


def _decode(raw: bytes) -> str | BrokenRow:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return BrokenRow("not UTF-8", f"not UTF-8 ({error.reason} at byte {error.start}); save the file as UTF-8")


def _parse(line: str) -> Any:
    try:
        return _checked_depth(json.loads(line))
    except json.JSONDecodeError as error:
        found = f"{error.msg}, column {error.colno}"
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits, and brackets in brackets in brackets.
        found = str(error)
    return BrokenRow("not JSON", f"not valid JSON ({found}); accepted: one JSON object a line, or one JSON array")


def _array_rows(file: str, raw: bytes, first_line: int) -> Iterator[Row]:
    line, counted, previous = first_line, 0, 0
    try:
        text = raw.removeprefix(codecs.BOM_UTF8).decode("utf-8")
        for number, (row, start) in enumerate(_array_elements(text), start=1):
            line, counted = line + text.count("\n", counted, start), start
            # Where one line holds many rows, it takes the row's number to find one.
            yield row, f"{file}:{line}" + (f" (row {number})" if line == previous else "")
            previous = line
    except UnicodeDecodeError as error:
        line = first_line + raw.count(b"\n", 0, error.start)
        raise DataError(f"{file}:{line}: not UTF-8 ({error.reason}); save the file as UTF-8.") from None
    except json.JSONDecodeError as error:
        place, found = f"{file}:{first_line + error.lineno - 1}", f"{error.msg}, column {error.colno}"
        raise DataError(f"{place}: not valid JSON ({found}); accepted: one JSON array of objects.") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}:{line}: not valid JSON in what follows ({error}).") from None


def _array_elements(text: str) -> Iterator[tuple[Any, int]]:
    """Values of the array that `text` is, each with the offset where it begins."""
    decoder = json.JSONDecoder()
    at = _skip_space(text, text.index("[") + 1)
    if text[at : at + 1] != "]":
        while True:
            value, end = decoder.raw_decode(text, at)
            yield _checked_depth(value), at
            at = _skip_space(text, end)
            if text[at : at + 1] != ",":
                break
            at = _skip_space(text, at + 1)
    if text[at : at + 1] != "]":
        raise json.JSONDecodeError("Expecting ',' or ']'", text, at)
    end = _skip_space(text, at + 1)
    if end < len(text):
        raise json.JSONDecodeError("Extra data", text, end)


def _checked_depth(value: Any) -> Any:
    """`value`, if all that walks through it later (templates, pickle, repr) can do so.

    Raises:
        ValueError: If it is nested too deeply.
    """
    level = [value]
    for _ in range(_MAX_DEPTH):
        if not level:
            return value
        level = [inner for item in level for inner in _inside(item)]
    raise ValueError(f"nested more than {_MAX_DEPTH} levels deep")


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _skip_space(text: str, at: int) -> int:
    match = _SPACES.match(text, at)
    assert match is not None
    return match.end()
