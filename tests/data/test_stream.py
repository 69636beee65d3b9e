"""A stream gives the pairs of the set in file order, counts what it drops, and starts anew at its end."""

import gc
import logging
import tracemalloc

import pytest

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.data import StreamWindows, load_pairs, open_stream
from ds_stochdpo.errors import DataError
from tests.data.texts import assistant
from tests.tiny import pair_rows, write_pairs, write_rows

ROWS = pair_rows(12)
ROWS[3] = {**ROWS[3], "chosen": None}
ROWS[7] = {**ROWS[7], "chosen": ROWS[7]["rejected"]}
STREAMED = {"streaming": True, "max_steps": 9, "reference": "none"}


def stream_of(path, tokenizer, vocab_size=None, **settings):
    config = StochDPOConfig(dataset_name=str(path), **STREAMED, **settings)
    return open_stream(config, tokenizer, vocab_size=vocab_size)


def key(pair):
    return (pair.pair_id, pair.source, pair.prompt_ids.tolist(), pair.chosen_ids.tolist(), pair.rejected_ids.tolist())


@pytest.mark.parametrize("settings", [{}, {"max_samples": 8}, {"max_length": 9}])
def test_passes_over_a_stream_are_the_set_in_file_order(tmp_path, tokenizer, settings):
    """Over two files, with short windows at the end of each pass, as with a set."""
    write_rows(tmp_path / "a.jsonl", ROWS[:5])
    write_rows(tmp_path / "b.jsonl", ROWS[5:])
    want = load_pairs(StochDPOConfig(dataset_name=str(tmp_path), **settings), tokenizer)
    stream = stream_of(tmp_path, tokenizer, **settings)
    windows = StreamWindows(stream, pairs_per_step=4)
    per_pass = -(-len(want.pairs) // 4)
    taken = [windows.take(step) for step in range(2 * per_pass)]
    for epoch in (0, 1):
        of_pass = taken[epoch * per_pass : (epoch + 1) * per_pass]
        assert {window.epoch for window in of_pass} == {epoch}
        assert [key(p) for window in of_pass for p in window.pairs] == [key(p) for p in want.pairs]
    for name in ("counts", "first_lines", "fingerprint", "max_length", "files"):
        assert getattr(stream, name) == getattr(want, name), name
    assert windows.passes(2 * per_pass) == 1


def test_only_the_rows_of_the_steps_taken_are_read_and_counted(tmp_path, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    with path.open("a") as file:
        file.write("what lies behind is not read\n")
    stream = stream_of(path, tokenizer)
    assert stream.counts == {"read": 0, "used": 0}
    windows = StreamWindows(stream, pairs_per_step=4)
    windows.take(0)
    assert stream.counts == {"read": 5, "used": 4, "dropped/not text": 1}
    windows.take(1)
    assert stream.counts == {"read": 10, "used": 8, "dropped/not text": 1, "dropped/identical responses": 1}
    assert stream.first_lines == {"dropped/not text": [f"{path}:4"], "dropped/identical responses": [f"{path}:8"]}


def test_a_resumed_run_reads_forward_and_never_back(tmp_path, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    through, resumed = (StreamWindows(stream_of(path, tokenizer), pairs_per_step=4) for _ in range(2))
    want = [through.take(step) for step in range(6)]
    for step in (4, 5):
        got = resumed.take(step)
        assert (got.epoch, [key(p) for p in got.pairs]) == (want[step].epoch, [key(p) for p in want[step].pairs])
    with pytest.raises(ValueError, match="at optimizer step 6; it cannot go back to 5"):
        resumed.take(5)


def test_a_dropped_row_is_logged_when_the_first_of_its_kind_comes(tmp_path, tokenizer, caplog):
    windows = StreamWindows(stream_of(write_rows(tmp_path / "r.jsonl", [*ROWS, ROWS[3]]), tokenizer), pairs_per_step=3)
    for step, said in enumerate(("", "dropped not text, first at", "dropped identical responses, first at", "", "")):
        caplog.clear()
        windows.take(step)
        assert [record.levelno for record in caplog.records] == [logging.WARNING] * bool(said)
        assert said in caplog.text


@pytest.mark.parametrize(
    ("rows", "vocab_size", "message"),
    [
        ([], None, r"rows\.jsonl: no rows"),
        ([ROWS[3], ROWS[7]], None, r"0 of 2 rows usable.*1 not text.*1 identical responses"),
        (ROWS, 40, r"rows\.jsonl:1: token id \d+ >= embedding rows 40; use the model's own tokenizer"),
        ([*ROWS[:3], {"prompt": "p", "chosen": "c", "rejected": [assistant("r")]}], None, r"rows\.jsonl:4: "),
    ],
    ids=["empty", "nothing usable", "unknown token", "a row that ends the run"],
)
def test_what_ends_a_stream(tmp_path, tokenizer, rows, vocab_size, message):
    windows = StreamWindows(
        stream_of(write_rows(tmp_path / "rows.jsonl", rows), tokenizer, vocab_size), pairs_per_step=4
    )
    with pytest.raises(DataError, match=message):
        windows.take(0)


def test_a_hub_set_is_streamed_by_datasets(monkeypatch, tokenizer):
    import datasets

    asked = []

    def load_dataset(name, **options):
        asked.append((name, options))
        return datasets.IterableDataset.from_generator(lambda: iter(pair_rows(3)))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    stream = stream_of("someone/pairs", tokenizer)
    window = StreamWindows(stream, pairs_per_step=2).take(1)
    assert asked == [("someone/pairs", {"split": "train", "streaming": True})]
    assert [pair.source for pair in window.pairs] == ["someone/pairs[train]:3"]
    assert stream.files == ["someone/pairs[train]"]


def test_memory_does_not_grow_with_the_stream(tmp_path, tokenizer):
    windows = StreamWindows(stream_of(write_pairs(tmp_path / "rows.jsonl", 400), tokenizer), pairs_per_step=20)
    windows.take(0)
    tracemalloc.start()
    held = []
    for step in (3, 19):
        windows.take(step)
        gc.collect()
        held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    # 320 rows lie between the two. A pair takes more than 500 bytes, a digest of a row 80.
    assert held[1] - held[0] < 10_000


def test_the_held_out_pairs_are_a_set_all_the_same(tmp_path, tokenizer):
    path = write_pairs(tmp_path / "rows.jsonl", 5)
    config = StochDPOConfig(dataset_name=str(path), dataset_test_split=str(path), **STREAMED)
    assert len(load_pairs(config, tokenizer, split="test").pairs) == 5
