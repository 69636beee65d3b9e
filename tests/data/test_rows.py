"""Containers and encodings: the same rows whatever the file looks like, each with its place."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.data.rows import find_source
from ds_stochdpo.data.tally import BrokenRow
from ds_stochdpo.errors import ConfigError, DataError
from tests.tiny import pair_rows, write_pairs, write_rows


def read(path, limit=None, split="train", **settings):
    config = StochDPOConfig(dataset_name=str(path), **settings)
    return list(find_source(config, split).rows(limit))


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


ROWS = pair_rows(5)
BLANKS = "\n\n".join(json.dumps(row) for row in ROWS)
INDENTED = json.dumps(ROWS, indent=2)
CONTAINERS = {
    "lines.jsonl": (lines(ROWS).encode(), [1, 2, 3, 4, 5]),
    "lines.json": (lines(ROWS).encode(), [1, 2, 3, 4, 5]),
    "bom.jsonl": (b"\xef\xbb\xbf" + lines(ROWS).encode(), [1, 2, 3, 4, 5]),
    "crlf.jsonl": (lines(ROWS).replace("\n", "\r\n").encode(), [1, 2, 3, 4, 5]),
    "blanks.jsonl": (b"\n \r\n" + BLANKS.encode(), [3, 5, 7, 9, 11]),
    "array.json": (INDENTED.encode(), [2, 7, 12, 17, 22]),
    "array.jsonl": (INDENTED.encode(), [2, 7, 12, 17, 22]),
    "array_bom.json": (b"\xef\xbb\xbf\n" + INDENTED.encode(), [3, 8, 13, 18, 23]),
    "array_in_one_line.json": (json.dumps(ROWS).encode(), [1, *(f"1 (row {n})" for n in range(2, 6))]),
    "lines.jsonl.gz": (gzip.compress(lines(ROWS).encode()), [1, 2, 3, 4, 5]),
    "array.json.gz": (gzip.compress(INDENTED.encode()), [2, 7, 12, 17, 22]),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container_gives_the_same_rows_and_counts_physical_lines(tmp_path, name):
    content, places = CONTAINERS[name]
    path = tmp_path / name
    path.write_bytes(content)
    assert read(path) == [(row, f"{path}:{place}") for row, place in zip(ROWS, places, strict=True)]


def test_parquet_gives_the_same_rows(tmp_path):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    assert read(path) == [(row, f"{path}:{i}") for i, row in enumerate(ROWS, start=1)]


def test_unicode_line_separators_inside_strings_do_not_split_a_row(tmp_path):
    rows = [{"prompt": "one\u2028two\u2029three\x85four", "chosen": "a", "rejected": "b"}]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(rows[0], ensure_ascii=False) + "\n", encoding="utf-8")
    assert [row for row, _ in read(path)] == rows


def test_a_folder_is_read_in_name_order(tmp_path):
    for name, part in (("b.jsonl", ROWS[2:]), ("a.jsonl", ROWS[:2])):
        write_rows(tmp_path / name, part)
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / "dataset_info.json").write_text("{}")
    write_rows(tmp_path / ".hidden.jsonl", ROWS)
    assert [row for row, _ in read(tmp_path)] == ROWS
    assert [source.rsplit("/", 1)[1] for _, source in read(tmp_path)] == [
        "a.jsonl:1", "a.jsonl:2", "b.jsonl:1", "b.jsonl:2", "b.jsonl:3"
    ]  # fmt: skip


def test_a_folder_says_which_data_it_does_not_read(tmp_path, caplog):
    write_rows(tmp_path / "a.jsonl", ROWS)
    for name in ("b.jsonl.zst", "c.csv", "LICENSE"):
        (tmp_path / name).write_text("")
    assert [row for row, _ in read(tmp_path)] == ROWS
    (notice,) = (record.getMessage() for record in caplog.records)
    assert "not read, for their format: b.jsonl.zst, c.csv; accepted: .json" in notice


def test_text_in_parquet_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "rows.parquet"
    raw = pyarrow.array([b"\xff"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": raw, "chosen": ["a"], "rejected": ["b"]}), path)
    with pytest.raises(DataError, match=r"rows.parquet: cannot be read as parquet: .*utf-8"):
        read(path)


def test_a_folder_with_files_named_after_splits_keeps_them_apart(tmp_path):
    (tmp_path / "data").mkdir()
    write_rows(tmp_path / "data" / "train-00000.jsonl", ROWS[:3])
    write_rows(tmp_path / "data" / "test-00000.jsonl", ROWS[3:])
    assert [row for row, _ in read(tmp_path)] == ROWS[:3]
    assert [row for row, _ in read(tmp_path, split="test", dataset_test_split="test")] == ROWS[3:]
    with pytest.raises(DataError, match="validation"):
        read(tmp_path, split="test", dataset_test_split="validation")


def test_the_held_out_file_of_a_folder_is_not_trained_on(tmp_path):
    write_rows(tmp_path / "a.jsonl", ROWS[:2])
    write_rows(tmp_path / "b.jsonl", ROWS[2:4])
    write_rows(tmp_path / "test.jsonl", ROWS[4:])
    assert [row for row, _ in read(tmp_path, dataset_test_split="test")] == ROWS[:4]
    assert [row for row, _ in read(tmp_path)] == ROWS


def test_the_test_split_may_be_a_file(tmp_path):
    train, test = write_pairs(tmp_path / "p.jsonl", 4), write_pairs(tmp_path / "q.jsonl", 2)
    assert [source for _, source in read(train, split="test", dataset_test_split=str(test))] == [
        f"{test}:1", f"{test}:2"
    ]  # fmt: skip


def test_a_set_saved_by_datasets_is_read_by_split(tmp_path):
    import datasets

    saved = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})
    saved.save_to_disk(str(tmp_path / "saved"))
    assert [row for row, _ in read(tmp_path / "saved")] == ROWS


def test_a_hub_name_goes_through_datasets(monkeypatch):
    import datasets

    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = read("someone/pairs", dataset_train_split="train_prefs[:9]", limit=2)
    assert asked == [("someone/pairs", "train_prefs[:9]")]
    assert rows == [(row, f"someone/pairs[train_prefs[:9]]:{i}") for i, row in enumerate(ROWS[:2], start=1)]


def test_the_limit_counts_rows_from_the_start(tmp_path):
    write_rows(tmp_path / "a.jsonl", ROWS[:2])
    write_rows(tmp_path / "b.jsonl", ROWS[2:])
    assert [row for row, _ in read(tmp_path, limit=3)] == ROWS[:3]


BROKEN_LINES = {
    "half": (b'{"prompt": "x"', "not JSON", "not valid JSON (Expecting ',' delimiter, column 15)"),
    "latin": (b'{"prompt": "\xe9"}', "not UTF-8", "not UTF-8 (invalid continuation byte at byte 12)"),
    "two rows": (b'{"prompt": "x"} {"prompt": "y"}', "not JSON", "Extra data, column 17"),
    "endless number": (b'{"prompt": ' + b"1" * 5000 + b"}", "not JSON", "integer string"),
    "endless": (b'{"prompt": ' + b"[" * 100000, "not JSON", "recursion"),
    "deep": (b'{"a":' * 101 + b"1" + b"}" * 101, "not JSON", "nested more than 100 levels"),
}


@pytest.mark.parametrize("packs", [bytes, gzip.compress])
@pytest.mark.parametrize("name", BROKEN_LINES)
def test_a_broken_line_stands_at_its_place_among_the_others(tmp_path, name, packs):
    line, reason, detail = BROKEN_LINES[name]
    path = tmp_path / ("rows.jsonl" if packs is bytes else "rows.jsonl.gz")
    path.write_bytes(packs(b"\n" + lines(ROWS[:1]).encode() + line + b"\n" + lines(ROWS[1:2]).encode()))
    first, (broken, place), last = read(path)
    assert (first, last) == ((ROWS[0], f"{path}:2"), (ROWS[1], f"{path}:4"))
    assert isinstance(broken, BrokenRow)
    assert (broken.reason, place) == (reason, f"{path}:3")
    assert detail in broken.detail


def test_a_compressed_file_that_ends_early_keeps_its_whole_lines(tmp_path):
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(gzip.compress(lines(ROWS).encode())[:-12])
    *rows, (broken, place) = read(path)
    assert rows == [(row, f"{path}:{n}") for n, row in enumerate(ROWS[: len(rows)], start=1)]
    assert isinstance(broken, BrokenRow)
    assert (broken.reason, place) == ("file cut off", f"{path}:{len(rows) + 1}")


BROKEN = {
    "array.json": (b'[\n{"prompt": "x"},\n{"prompt" "y"}\n]', r"array.json:3: not valid JSON"),
    "ends.json": (b'[\n{"prompt": "x"}\n', r"ends.json:3: not valid JSON \(Expecting ',' or '\]'"),
    "comma.json": (b'[\n{"prompt": "x"},\n]', r"comma.json:3: not valid JSON"),
    "more.json": (b'[\n{"prompt": "x"}]\n[]', r"more.json:3: not valid JSON \(Extra data"),
    "latin.json": (b'[\n{"prompt": "x"},\n{"prompt": "\xe9"}]', r"latin.json:3: not UTF-8"),
    "number.json": (b'[\n{"prompt": ' + b"1" * 5000 + b"}]", r"number.json:2: not valid JSON in what follows"),
    "deep.json": (b"[\n" + b"[" * 101 + b"]" * 102, r"deep.json:2: not valid JSON in what follows \(nested more"),
    "cut.json.gz": (gzip.compress(INDENTED.encode())[:-12], r"cut.json.gz: cannot be read"),
    "plain.jsonl.gz": (lines(ROWS).encode(), r"plain.jsonl.gz: cannot be read"),
    "damaged.jsonl.gz": (gzip.compress(lines(ROWS).encode())[:-8] + bytes(8), r"damaged.jsonl.gz: cannot be read"),
    "fake.parquet": (lines(ROWS).encode(), r"fake.parquet: cannot be read as parquet"),
    "rows.csv": (b"prompt,chosen,rejected\n", r"rows.csv: this format is not supported"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named_with_its_line(tmp_path, name):
    content, message = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path / name)


RENAMED = [{"question": r["prompt"], "good": r["chosen"], "bad": r["rejected"]} for r in ROWS]
MAPPING = {"question": "prompt", "good": "chosen", "bad": "rejected"}


def test_columns_are_renamed_all_at_once(tmp_path):
    path = write_rows(tmp_path / "p.jsonl", RENAMED)
    assert [row for row, _ in read(path, column_mapping=MAPPING)] == ROWS
    swapped = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in ROWS]
    path = write_rows(tmp_path / "q.jsonl", swapped)
    assert [row for row, _ in read(path, column_mapping={"chosen": "rejected", "rejected": "chosen"})] == ROWS
    path = write_rows(tmp_path / "r.jsonl", [{**row, "chosen": 0} for row in RENAMED])
    assert [row for row, _ in read(path, column_mapping=MAPPING)] == [{**row, "chosen (replaced)": 0} for row in ROWS]


@pytest.mark.parametrize(
    ("rows", "mapping", "message"),
    [
        (RENAMED, {**MAPPING, "goood": "chosen", "good": "input"}, r"'goood', but .*p.jsonl:1 .*question, good, bad;"),
        (RENAMED, {**MAPPING, "sytem": "system"}, r"'sytem', but the whole set .*question, good, bad;"),
        ([3, RENAMED[0]], {"q": "prompt"}, r"'q', but .*p.jsonl:2 .*question, good, bad;"),
    ],
)
def test_a_column_that_is_not_there_cannot_be_renamed(tmp_path, rows, mapping, message):
    path = write_rows(tmp_path / "p.jsonl", rows)
    with pytest.raises(ConfigError, match=message):
        read(path, column_mapping=mapping)


def test_an_optional_column_may_come_late(tmp_path):
    path = write_rows(tmp_path / "p.jsonl", [ROWS[0], {**ROWS[1], "sys": "x"}])
    assert [row for row, _ in read(path, column_mapping={"sys": "system"})] == [ROWS[0], {**ROWS[1], "system": "x"}]


@pytest.mark.parametrize("name", ["./nothing/here", "missing.jsonl"])
def test_a_missing_path_is_named(name):
    with pytest.raises(DataError, match=f"{name}: no such"):
        read(name)


def test_an_empty_folder_says_what_would_be_accepted(tmp_path):
    with pytest.raises(DataError, match=r"no data file .* accepted: \.json"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("split", "settings", "message"),
    [
        ("train", {"dataset_train_split": "train[:5]"}, r"dataset_train_split is 'train\[:5\]'"),
        ("test", {"dataset_test_split": "test"}, "dataset_test_split is 'test'"),
        ("test", {}, "dataset_test_split is not set"),
    ],
)
def test_one_file_has_no_splits(tmp_path, split, settings, message):
    with pytest.raises(ConfigError, match=message):
        read(write_pairs(tmp_path / "p.jsonl", 3), split=split, **settings)


def test_no_name_is_a_setting_error():
    with pytest.raises(ConfigError, match="dataset_name is empty"):
        read("")
