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
_ARRAY_CHUNK = 2**16
"""Bytes of an array that are read at once, at least."""
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
            if _begins_array(handle):
                yield from _array_rows(place, b"", handle, 1)
            else:
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
                yield from _array_rows(place, raw, handle, number)
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


def _begins_array(handle: gzip.GzipFile | io.BufferedReader) -> bool:
    """Whether the file is an array, as far as its first bytes tell: read by lines, it may be one line of any length."""
    try:
        return handle.peek(1).removeprefix(codecs.BOM_UTF8).lstrip(_JSON_SPACE.encode())[:1] == b"["
    except (OSError, EOFError, zlib.error):
        return False


def _array_rows(file: str, raw: bytes, handle: gzip.GzipFile | io.BufferedReader, first_line: int) -> Iterator[Row]:
    """Rows of the array that `raw` and then `handle` hold."""
    text, previous = _ArrayText(raw, handle, first_line), 0
    try:
        for number, (row, line) in enumerate(_array_elements(text), start=1):
            # Where one line holds many rows, it takes the row's number to find one.
            yield row, f"{file}:{line}" + (f" (row {number})" if line == previous else "")
            previous = line
    except UnicodeDecodeError as error:
        line = text.line_at(len(text.text)) + error.object.count(b"\n", 0, error.start)
        raise DataError(f"{file}:{line}: not UTF-8 ({error.reason}); save the file as UTF-8.") from None
    except json.JSONDecodeError as error:
        column = error.colno + (text.column if error.lineno == 1 else 0)
        place, found = f"{file}:{text.line_at(error.pos)}", f"{error.msg}, column {column}"
        raise DataError(f"{place}: not valid JSON ({found}); accepted: one JSON array of objects.") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}:{text.row_line}: not valid JSON in what follows ({error}).") from None


class _ArrayText:
    """The part of a JSON array that is being read.

    Attributes:
        text: What is held of it.
        at: Where the next value or separator is.
        column: Characters before `text` in its first line.
        row_line: Line on which the latest value begins.
    """

    def __init__(self, raw: bytes, handle: gzip.GzipFile | io.BufferedReader, first_line: int) -> None:
        self._handle, self._line = handle, first_line
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self.text = self._decoder.decode(raw).removeprefix("\ufeff")
        self.at, self.column, self.row_line = 0, 0, first_line

    def line_at(self, offset: int) -> int:
        """Line of the file at an offset of `text`."""
        return self._line + self.text.count("\n", 0, offset)

    def more(self) -> bool:
        """Hold more of the array; False at its end. Twice as much each time, since a long value is tried again."""
        chunk = self._handle.read(max(_ARRAY_CHUNK, len(self.text)))
        is_start = not self.text and self._line == 1
        text = self._decoder.decode(chunk, final=not chunk)
        self.text += text.removeprefix("\ufeff") if is_start else text
        return bool(chunk)

    def advance(self, offset: int) -> None:
        """Go on at an offset, behind space, and let go of what lies before if that is much."""
        self.at = _skip_space(self.text, offset)
        while self.at == len(self.text) and self.more():
            self.at = _skip_space(self.text, self.at)
        if self.at > _ARRAY_CHUNK:
            last = self.text.rfind("\n", 0, self.at)
            self.column = self.at - last - 1 if last >= 0 else self.column + self.at
            self._line, self.text, self.at = self.line_at(self.at), self.text[self.at :], 0

    def is_at(self, mark: str) -> bool:
        """Whether `mark` comes next."""
        return self.text.startswith(mark, self.at)

    def value(self) -> Any:
        """The next value, and go on behind it."""
        decoder = json.JSONDecoder()
        while True:
            try:
                value, end = decoder.raw_decode(self.text, self.at)
            except json.JSONDecodeError:
                if not self.more():
                    raise
            else:
                # A number at the end of what is held may go on.
                if end < len(self.text) or not self.more():
                    self.advance(end)
                    return value


def _array_elements(text: _ArrayText) -> Iterator[tuple[Any, int]]:
    """Values of an array, each with the line where it begins."""
    text.advance(0)
    text.advance(text.at + 1)
    if not text.is_at("]"):
        while True:
            text.row_line = text.line_at(text.at)
            yield _checked_depth(text.value()), text.row_line
            if not text.is_at(","):
                break
            text.advance(text.at + 1)
    if not text.is_at("]"):
        raise json.JSONDecodeError("Expecting ',' or ']'", text.text, text.at)
    text.advance(text.at + 1)
    if text.at < len(text.text):
        raise json.JSONDecodeError("Extra data", text.text, text.at)


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
