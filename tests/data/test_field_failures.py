"""What went wrong in other trainers: rows and files that must give the same pairs, be counted, or be refused."""

import gzip
import json
import logging

import pyarrow
import pyarrow.parquet
import pytest

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.data import load_pairs
from ds_stochdpo.errors import ConfigError, DataError
from tests.data.texts import assistant, chatml, decoded, ids_of, system, user
from tests.tiny import CHAT, pair_rows, tiny_tokenizer, write_rows

ROWS = pair_rows(24)
PLAIN = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
RENAMED = [{"question": row["prompt"], "good": row["chosen"], "bad": row["rejected"]} for row in ROWS]
MAPPING = {"question": "prompt", "good": "chosen", "bad": "rejected"}


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def with_extra(i, row):
    return {"id": i, "messages": [user("hi")], "meta": {"score": 0.5}, **row, "margin": 0.1 * i}


def with_mixed_ids(i, row):
    return {**row, "id": i if i % 2 else f"a-{i}", "margin": float("nan") if i == 2 else 0.5}


def parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


# Each gives the pairs of the plain file: its name and content, and settings.
SAME = {
    "extra columns": ("p.jsonl", jsonl([with_extra(i, row) for i, row in enumerate(ROWS)]), {}),
    "renamed columns": ("p.jsonl", jsonl(RENAMED), {"column_mapping": MAPPING}),
    "ids of two types and a score that is no number": (
        "p.jsonl", jsonl([with_mixed_ids(i, row) for i, row in enumerate(ROWS)]), {}
    ),
    "byte order mark": ("p.jsonl", b"\xef\xbb\xbf" + PLAIN, {}),
    "carriage returns": ("p.jsonl", PLAIN.replace(b"\n", b"\r\n"), {}),
    "byte order mark and carriage returns": ("p.jsonl", b"\xef\xbb\xbf" + PLAIN.replace(b"\n", b"\r\n"), {}),
    "blank lines, no final newline": ("p.jsonl", b"\n  \n" + PLAIN.replace(b"\n", b"\n\n \r\n").rstrip(), {}),
    "array, indented": ("p.json", json.dumps(ROWS, indent=4).encode(), {}),
    "array in one line": ("p.json", json.dumps(ROWS).encode(), {}),
    "array that calls itself lines": ("p.jsonl", json.dumps(ROWS, indent=1).encode(), {}),
    "lines that call themselves an array": ("p.json", PLAIN, {}),
    "compressed": ("p.jsonl.gz", gzip.compress(PLAIN), {}),
    "compressed in pieces": ("p.jsonl.gz", gzip.compress(PLAIN[:300]) + gzip.compress(PLAIN[300:]), {}),
    "keys escaped": ("p.jsonl", PLAIN.replace(b'"chosen"', b'"\\u0063hosen"'), {}),
    "a broken line, skipped": ("p.jsonl", PLAIN + b'{"prompt": "x\n', {"data_errors": "skip"}),
    "a column named with half a character": ("p.jsonl", jsonl([{**row, "x\ud800": 1} for row in ROWS]), {}),
    "null columns": ("p.jsonl", jsonl([{**row, "tools": None, "system": None} for row in ROWS]), {}),
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return load(tmp_path_factory.mktemp("plain") / "p.jsonl", PLAIN)


def load(path, content, tokenizer=None, context_length=None, **settings):
    path.write_bytes(content)
    config = StochDPOConfig(dataset_name=str(path), **settings)
    return load_pairs(config, tokenizer or tiny_tokenizer(), context_length=context_length)


@pytest.mark.parametrize("name", SAME)
def test_the_same_pairs_token_by_token(tmp_path, plain, name):
    file, content, settings = SAME[name]
    loaded = load(tmp_path / file, content, **settings)
    assert ids_of(loaded) == ids_of(plain)
    assert loaded.fingerprint == plain.fingerprint


def test_the_same_pairs_from_parquet_and_from_files_in_name_order(tmp_path, plain):
    parquet(tmp_path / "p.parquet", [with_extra(i, row) for i, row in enumerate(ROWS)])
    folder = tmp_path / "folder"
    folder.mkdir()
    write_rows(folder / "b.jsonl", ROWS[7:])
    parquet(folder / "a.parquet", ROWS[:7])
    for source, files in ((tmp_path / "p.parquet", ["p.parquet"]), (folder, ["a.parquet", "b.jsonl"])):
        loaded = load_pairs(StochDPOConfig(dataset_name=str(source)), tiny_tokenizer())
        assert loaded.fingerprint == plain.fingerprint
        assert [file.rsplit("/", 1)[1] for file in loaded.files] == files
    assert loaded.pairs[7].source == f"{folder / 'b.jsonl'}:1"


@pytest.mark.parametrize("tokenizer", [{"pad": None}, {"pad": "<|im_end|>"}, {"bos": "<s>"}])
def test_the_same_pairs_whatever_pad_and_begin_token_are_defined(tmp_path, plain, tokenizer):
    loaded = load(tmp_path / "p.jsonl", PLAIN, tiny_tokenizer(**tokenizer))
    assert ids_of(loaded) == ids_of(plain)
    assert max(int(pair.chosen_ids.max()) for pair in loaded.pairs) < 347


def test_columns_that_are_not_used_are_named_once(tmp_path, caplog):
    load(tmp_path / "p.jsonl", SAME["extra columns"][1])
    notices = [record.getMessage() for record in caplog.records if "columns not used" in record.getMessage()]
    assert [notice.split("not used: ")[1] for notice in notices] == ["id, messages, meta, margin"]


@pytest.mark.parametrize(
    ("content", "settings", "error", "message"),
    [
        (jsonl(RENAMED), {"column_mapping": {**MAPPING, "goood": "chosen", "good": "input"}}, ConfigError,
         r"'goood', but .*p.jsonl:1 has the columns question, good, bad;"),
        (jsonl(RENAMED), {}, DataError, r"p.jsonl:1: no known layout .*: question, good, bad\. Accepted: .*column_map"),
        (b"", {}, DataError, r"p.jsonl: no rows"),
        (b"\n\n \n", {}, DataError, r"p.jsonl: no rows"),
        (b"[]", {}, DataError, r"p.jsonl: no rows"),
        (PLAIN[:500] + b"\n" + PLAIN, {}, DataError, r"p.jsonl:7: not valid JSON"),
        (PLAIN + b'{"prompt": "\xe9"}\n', {}, DataError, r"p.jsonl:25: not UTF-8"),
        (PLAIN.decode().encode("utf-16"), {}, DataError, r"p.jsonl:1: not UTF-8"),
        (jsonl([{"prompt": "2+2?", "chosen": 4, "rejected": 5}]), {}, DataError,
         r"0 of 1 rows usable\. 1 not text: .*p.jsonl:1 \(chosen is a number\)"),
        (jsonl([{"prompt": "2+2?", "chosen": "4", "rejected": {"a": 1}}]), {}, DataError,
         r"0 of 1 .*\(rejected is an object\)"),
        (PLAIN, {"max_length": 400}, ConfigError, r"max_length is 400, but the model has 256 positions"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_refused_with_what_and_where(tmp_path, content, settings, error, message):
    with pytest.raises(error, match=message):
        load(tmp_path / "p.jsonl", content, context_length=256, **settings)


STRINGS_TWICE = [{"prompt": "Say stop.", "chosen": "Stop.", "rejected": ""}]
MESSAGES_TWICE = [{"prompt": [user("Say stop.")], "chosen": [assistant("Stop.")], "rejected": [assistant("")]}]


@pytest.mark.parametrize(("rows", "end"), [(STRINGS_TWICE, "<|im_end|>"), (MESSAGES_TWICE, "<|im_end|>\n")])
def test_an_empty_response_is_its_end_token(tmp_path, rows, end):
    loaded = load(tmp_path / "p.jsonl", jsonl(rows))
    assert decoded(tiny_tokenizer(), loaded.pairs[0])[1:] == ("Stop." + end, end)


def test_an_empty_prompt_message_still_has_a_header_before_the_response(tmp_path):
    row = {"prompt": [user("")], "chosen": [assistant("Hello.")], "rejected": [assistant("Go away.")]}
    loaded = load(tmp_path / "p.jsonl", jsonl([row]))
    assert decoded(tiny_tokenizer(), loaded.pairs[0])[0] == chatml(user(""), header=True)


UNICODE = [
    "one\u2028two\u2029three\x85four\x0bfive\x0c",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 family",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd",
    "e\u0301 o\u0308 \u0634\u064e",
    "\ufeffmark \u200e\u202e turned \x00 zero \t tab",
]


@pytest.mark.parametrize("escaped", [True, False])
def test_every_character_survives(tmp_path, escaped):
    rows = [{"prompt": text, "chosen": text + "!", "rejected": text[::-1]} for text in UNICODE]
    content = "".join(json.dumps(row, ensure_ascii=escaped) + "\n" for row in rows).encode()
    loaded = load(tmp_path / "p.jsonl", content)
    assert loaded.counts["used"] == len(rows)
    for row, pair in zip(rows, loaded.pairs, strict=True):
        prompt, chosen, rejected = decoded(tiny_tokenizer(), pair)
        end = "<|im_end|>"
        assert (prompt + chosen, prompt + rejected) == (
            row["prompt"] + row["chosen"] + end, row["prompt"] + row["rejected"] + end
        )  # fmt: skip


CONTROL = "what does <|im_end|>\n<|im_start|>assistant\nmean?"


@pytest.mark.parametrize(
    ("row", "response"),
    [
        ({"prompt": [user(CONTROL)], "chosen": [assistant("end of turn")], "rejected": [assistant("a fruit")]},
         "end of turn<|im_end|>\n"),
        ({"prompt": [system("<s>"), user("Hi")], "chosen": [assistant("<|im_end|>Hi")], "rejected": [assistant("a")]},
         "<|im_end|>Hi<|im_end|>\n"),
        ({"prompt": CONTROL, "chosen": "end of turn", "rejected": "a fruit"}, "end of turn<|im_end|>"),
    ],
)  # fmt: skip
def test_control_tokens_in_text_are_kept_counted_and_move_no_boundary(tmp_path, caplog, row, response):
    loaded = load(tmp_path / "p.jsonl", jsonl([row, row | {"rejected": row["chosen"], "chosen": row["rejected"]}]))
    assert loaded.counts == {"read": 2, "used": 2, "noted/control tokens in text": 2}
    assert decoded(tiny_tokenizer(), loaded.pairs[0])[1] == response
    assert sum("2 control tokens in text" in record.getMessage() for record in caplog.records) == 1


def test_an_end_token_at_the_end_of_a_string_is_no_notice(tmp_path):
    row = {"prompt": "Hi", "chosen": "Hello.<|im_end|>", "rejected": "Go away.<|im_end|>"}
    assert load(tmp_path / "p.jsonl", jsonl([row])).counts == {"read": 1, "used": 1}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Name one.", "chosen": "Name one. Blue.", "rejected": "Name one. Green."},
        {"prompt": [user("Name one.")], "chosen": [assistant("Name one. Blue.")],
         "rejected": [assistant("Name one. Green.")]},
    ],
)  # fmt: skip
def test_a_response_that_repeats_the_prompt_is_counted_and_left_alone(tmp_path, row):
    loaded = load(tmp_path / "p.jsonl", jsonl([row]))
    assert loaded.counts == {"read": 1, "used": 1, "noted/response repeats prompt": 1}
    assert decoded(tiny_tokenizer(), loaded.pairs[0])[1].startswith("Name one. Blue.<|im_end|>")


def test_a_limit_that_is_not_set_is_the_models_and_is_printed(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    row = {"prompt": " egg" * 400, "chosen": " Blue.", "rejected": " Green."}
    loaded = load(tmp_path / "p.jsonl", jsonl([row]), context_length=256)
    assert loaded.counts == {"read": 1, "used": 1, "truncated/prompt (max_length)": 1}
    assert loaded.max_length == 256
    assert sum("max_length is not set; it is 256" in record.getMessage() for record in caplog.records) == 1


def test_begin_token_of_template_and_tokenizer_is_one(tmp_path):
    tok = tiny_tokenizer(bos="<s>", template="{{ bos_token }}" + CHAT, adds_bos=True)
    rows = [
        {"prompt": [user("Hi")], "chosen": [assistant("a")], "rejected": [assistant("b")]},
        {"prompt": "Hi", "chosen": "a", "rejected": "b"},
        {"prompt": "<s>Hi", "chosen": "a", "rejected": "b"},
    ]
    loaded = load(tmp_path / "p.jsonl", jsonl(rows), tok)
    for pair in loaded.pairs:
        ids = [*pair.prompt_ids, *pair.chosen_ids]
        assert (ids.count(2), ids[0]) == (1, 2)
