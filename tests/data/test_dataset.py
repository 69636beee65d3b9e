"""The account of a load: counts, notices, fingerprint, and errors that say what to do."""

import numpy as np
import pytest

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.data import load_pairs
from ds_stochdpo.errors import DataError
from tests.data.texts import ids_of
from tests.tiny import pair_rows, tiny_tokenizer, write_pairs, write_rows


def test_every_row_becomes_a_pair_of_int64_ids(load, tokenizer):
    rows = pair_rows()
    loaded = load(rows)
    assert loaded.counts == {"read": 24, "used": 24}
    assert loaded.first_lines == {}
    for index, (row, pair) in enumerate(zip(rows, loaded.pairs, strict=True)):
        assert pair.pair_id == index
        assert pair.source.endswith(f"rows.jsonl:{index + 1}")
        for ids, text in (
            (pair.prompt_ids, row["prompt"]),
            (pair.chosen_ids, row["chosen"] + "<|im_end|>"),
            (pair.rejected_ids, row["rejected"] + "<|im_end|>"),
        ):
            assert ids.dtype == np.int64
            assert tokenizer.decode(ids) == text


def test_pair_ids_run_over_all_files_and_keep_gaps(tmp_path, tokenizer):
    rows = pair_rows(6)
    rows[1] = {**rows[1], "chosen": None}
    write_rows(tmp_path / "b.jsonl", rows[3:])
    write_rows(tmp_path / "a.jsonl", rows[:3])
    loaded = load_pairs(StochDPOConfig(dataset_name=str(tmp_path)), tokenizer)
    assert [pair.pair_id for pair in loaded.pairs] == [0, 2, 3, 4, 5]
    assert loaded.files == [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    assert loaded.first_lines == {"dropped/not text": [f"{tmp_path / 'a.jsonl'}:2"]}


def test_the_test_split_is_loaded_alike(tmp_path, tokenizer):
    train, test = write_pairs(tmp_path / "p.jsonl", 6), write_pairs(tmp_path / "q.jsonl", 3)
    config = StochDPOConfig(dataset_name=str(train), dataset_test_split=str(test))
    assert ids_of(load_pairs(config, tokenizer, split="test")) == ids_of(load_pairs(config, tokenizer))[:3]


def test_max_samples_takes_rows_from_the_start(load):
    assert ids_of(load(pair_rows(), max_samples=7)) == ids_of(load(pair_rows(7)))


def test_fingerprint_follows_the_tokens_and_nothing_else(load):
    rows = pair_rows(6)
    base = load(rows).fingerprint
    assert len(base) == 64
    assert load(rows, learning_rate=1e-3, beta=0.5, seed=3, output_dir="elsewhere").fingerprint == base
    assert load([{**row, "id": i} for i, row in enumerate(rows)]).fingerprint == base
    assert load(rows, tiny_tokenizer(pad=None)).fingerprint == base
    changed = [
        load(rows[:5]),
        load(rows[::-1]),
        load(rows, max_length=8),
        load(rows, tiny_tokenizer(eos="</s>")),
        load([rows[0] | {"chosen": rows[0]["rejected"], "rejected": rows[0]["chosen"]}, *rows[1:]]),
    ]
    assert len({base, *(pairs.fingerprint for pairs in changed)}) == 1 + len(changed)


def test_no_usable_row_is_an_error_with_reasons_and_lines(load):
    bad = [{"prompt": "x", "chosen": chosen, "rejected": "y"} for chosen in (None, None, {"a": 1}, "y")]
    with pytest.raises(DataError) as caught:
        load(bad)
    message = str(caught.value)
    assert "0 of 4 rows usable" in message
    assert "3 not text: " in message
    assert "(chosen is null)" in message
    assert "1 identical responses: " in message
    for line in range(1, 5):
        assert f"rows.jsonl:{line}" in message


def test_an_empty_file_is_named(load):
    with pytest.raises(DataError, match=r"rows\.jsonl: no rows"):
        load([])


def test_dropped_rows_are_logged_once_a_reason(load, caplog):
    load([*pair_rows(3), {"prompt": "2+2?", "chosen": 4, "rejected": 5}])
    dropped = [record.getMessage() for record in caplog.records if "dropped" in record.getMessage()]
    assert len(dropped) == 1
    assert "1 not text" in dropped[0]
    assert dropped[0].endswith("rows.jsonl:4 (chosen is a number)")


def test_repeated_rows_are_used_and_noticed_once(load, caplog):
    loaded = load(pair_rows() * 2)
    assert loaded.counts == {"read": 48, "used": 48, "noted/duplicate rows": 24}
    assert sum("24 duplicate rows" in record.getMessage() for record in caplog.records) == 1


def test_responses_that_repeat_the_prompt_are_noticed_and_left_alone(load, tokenizer):
    row = {"prompt": "Name one.", "chosen": "Name one. Blue.", "rejected": "Name one. Green."}
    loaded = load([row])
    assert loaded.counts == {"read": 1, "used": 1, "noted/response repeats prompt": 1}
    assert tokenizer.decode(loaded.pairs[0].chosen_ids) == "Name one. Blue.<|im_end|>"


@pytest.mark.parametrize(("progress", "is_shown"), [(None, False), (True, True), (False, False)])
def test_progress_is_silent_off_a_terminal(tmp_path, tokenizer, capsys, progress, is_shown):
    path = write_pairs(tmp_path / "p.jsonl", 3)
    load_pairs(StochDPOConfig(dataset_name=str(path)), tokenizer, progress=progress)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert ("tokenising" in captured.err) == is_shown
