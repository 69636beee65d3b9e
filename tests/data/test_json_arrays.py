"""Arrays are read as they are needed, whatever part of them is held at a time."""

import gzip
import json

import pytest

from ds_stochdpo.data import json_rows
from ds_stochdpo.errors import DataError

VALUES = [{"prompt": '\u00e4\u2028\U0001f600 "[,]" \\', "n": [1.5e-3, -12345]}, 17, [], "", None, {"a": {"b": ["]"]}}]
ENCODED = {
    "one line": json.dumps(VALUES, ensure_ascii=False),
    "indented": json.dumps(VALUES, indent=2, ensure_ascii=False) + "\n\n",
    "a row a line": "[\r\n" + ",\r\n".join(json.dumps(value) for value in VALUES) + "\r\n]",
    "blank lines first": "\n \n" + json.dumps(VALUES) + " \n",
    "byte order mark": "\ufeff" + json.dumps(VALUES, ensure_ascii=False),
    "empty": " [ ] ",
}


def lines_of(text):
    """Line on which each value begins, from where `json` finds it in the whole text."""
    decoder, at, lines = json.JSONDecoder(), text.index("[") + 1, []
    while True:
        while text[at] in " \r\n,":
            at += 1
        if text[at] == "]":
            return lines
        lines.append(1 + text.count("\n", 0, at))
        _, at = decoder.raw_decode(text, at)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 2**20])
@pytest.mark.parametrize("name", ENCODED)
@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_values_and_lines_do_not_depend_on_what_is_held(tmp_path, monkeypatch, chunk, name, suffix):
    monkeypatch.setattr(json_rows, "_ARRAY_CHUNK", chunk)
    path, raw = tmp_path / f"rows{suffix}", ENCODED[name].encode("utf-8")
    path.write_bytes(gzip.compress(raw) if suffix.endswith("gz") else raw)
    rows = list(json_rows.json_rows(path))
    assert [row for row, _ in rows] == ([] if name == "empty" else VALUES)
    places = [place.removeprefix(f"{path}:").split(" ")[0] for _, place in rows]
    assert places == [str(line) for line in lines_of(ENCODED[name])]


@pytest.mark.parametrize("chunk", [1, 5, 2**20])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"a": 1},\n {"b": }]', r":2: not valid JSON \(Expecting value, column 8\)"),
        ("[1, 2,\n3, x, 5]", r":2: not valid JSON \(Expecting value, column 4\)"),
        ("[1,\n2\n3]", r":3: not valid JSON \(Expecting ',' or '\]', column 1\)"),
        ("[1,\n2", r":2: not valid JSON \(Expecting ',' or '\]', column 2\)"),
        ('[1,\n"open', r":2: not valid JSON \(Unterminated string starting at, column 1\)"),
        ("[1]\n\n2", r":3: not valid JSON \(Extra data, column 1\)"),
        (b'[1,\n"\xff"]', r":2: not UTF-8 \(invalid start byte\)"),
        (b'[1,\n"\xc3', r":2: not UTF-8 \(unexpected end of data\)"),
    ],
)
def test_faults_are_found_at_their_line(tmp_path, monkeypatch, chunk, text, message):
    monkeypatch.setattr(json_rows, "_ARRAY_CHUNK", chunk)
    path = tmp_path / "rows.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=message):
        list(json_rows.json_rows(path))


def test_a_long_array_is_not_held(tmp_path, monkeypatch):
    monkeypatch.setattr(json_rows, "_ARRAY_CHUNK", 1000)
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"prompt": "x" * 90, "n": n} for n in range(2000)]))
    held = []
    more = json_rows._ArrayText.more
    monkeypatch.setattr(json_rows._ArrayText, "more", lambda self: (more(self), held.append(len(self.text)))[0])
    numbers = [(row["n"], len(held)) for row, _ in json_rows.json_rows(path)]
    assert [n for n, _ in numbers] == list(range(2000))
    # Of 220 kB a few thousand characters, and the first row comes before the last is read.
    assert max(held) < 5000
    assert numbers[0][1] == 1
