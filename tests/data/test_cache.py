"""Tokenised rows are kept under all they depend on, and give the same pairs from disk, from one process or many."""

import datetime
import json
import logging
import multiprocessing
import os
import signal
import time

import numpy as np
import pytest
from tokenizers import AddedToken, normalizers

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.data import cache, load_pairs, workers
from ds_stochdpo.data.outcome import RowTokeniser
from ds_stochdpo.errors import DataError
from tests.data.texts import assistant, ids_of, user
from tests.tiny import CHAT, pair_rows, tiny_tokenizer, write_pairs, write_rows


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ds_stochdpo"


@pytest.fixture
def tokenised(monkeypatch):
    """Places of the rows that were tokenised since the last look, in this process."""
    seen = []
    call = RowTokeniser.__call__

    def spy(self, row, source):
        seen.append(source)
        return call(self, row, source)

    def since_last_look():
        done = list(seen)
        seen.clear()
        return done

    monkeypatch.setattr(RowTokeniser, "__call__", spy)
    return since_last_look


def load(path, tokenizer=None, **settings):
    return load_pairs(StochDPOConfig(dataset_name=str(path), **settings), tokenizer or tiny_tokenizer())


MIXED = [
    *pair_rows(5),
    {"prompt": "p", "chosen": None, "rejected": "x", "extra\ud800": 1},
    {"prompt": "\u2028 \U0001f600", "chosen": "\u00e4" * 30, "rejected": "b"},
    {"prompt": [user("Hi")], "chosen": [assistant("a")], "rejected": [assistant("b")], "score": 2},
    pair_rows(1)[0],
    [1, 2],
    {"prompt": "p", "wrong": 1},
]


def test_a_set_from_disk_is_the_set_that_was_made(tmp_path, folder, tokenised):
    path = write_rows(tmp_path / "rows.jsonl", MIXED)
    made = load(path, max_length=20, data_errors="skip")
    assert len(tokenised()) == len(MIXED)
    assert len(list(folder.glob("*.arrow"))) == 1
    read = load(path, max_length=20, data_errors="skip")
    assert tokenised() == []
    for name in ("counts", "first_lines", "fingerprint", "max_length", "files"):
        assert getattr(read, name) == getattr(made, name), name
    assert read.counts["used"] == 8
    assert read.counts["dropped/no known layout"] == read.counts["noted/duplicate rows"] == 1
    assert ids_of(read) == ids_of(made)
    assert [(p.pair_id, p.source) for p in read.pairs] == [(p.pair_id, p.source) for p in made.pairs]
    assert {p.chosen_ids.dtype for p in read.pairs} == {np.dtype(np.int64)}


def test_the_file_is_one_that_datasets_reads(tmp_path, folder):
    import datasets

    made = load(write_pairs(tmp_path / "rows.jsonl", 4))
    stored = datasets.Dataset.from_file(str(next(folder.glob("*.arrow"))))
    assert stored["chosen_ids"][:] == [pair.chosen_ids.tolist() for pair in made.pairs]


def lower_cased():
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


def with_token(special=False):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("number", special=special)], special_tokens=special)
    return tokenizer


def one_merge_less():
    tokenizer = tiny_tokenizer()
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["model"]["merges"].pop()
    tokenizer.backend_tokenizer.__setstate__(json.dumps(state).encode())
    return tokenizer


def edited_in_place(path):
    """Other content, and the size and times of before."""
    stat = path.stat()
    path.write_text(path.read_text().replace("Name number 1.", "Name number 9.", 1))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_size == stat.st_size


KEY_PARTS = {
    "content": (edited_in_place, {}),
    "place": (lambda path: path.rename(path.with_name("moved.jsonl")), {}),
    "max_length": (None, {"max_length": 9}),
    "max_prompt_length": (None, {"max_prompt_length": 3}),
    "truncation_mode": (None, {"truncation_mode": "keep_start"}),
    "max_samples": (None, {"max_samples": 5}),
    "column_mapping": (None, {"column_mapping": {"chosen": "rejected", "rejected": "chosen"}}),
    "normaliser": (None, {"tokenizer": lower_cased()}),
    "added token": (None, {"tokenizer": with_token()}),
    "special token": (None, {"tokenizer": with_token(special=True)}),
    "merges": (None, {"tokenizer": one_merge_less()}),
    "end token": (None, {"tokenizer": tiny_tokenizer(eos="</s>")}),
    "begin token": (None, {"tokenizer": tiny_tokenizer(bos="<s>")}),
    "begin token written": (None, {"tokenizer": tiny_tokenizer(bos="<s>", adds_bos=True)}),
    "template": (None, {"tokenizer": tiny_tokenizer(template=CHAT + "\n")}),
}


@pytest.mark.parametrize("part", KEY_PARTS)
def test_whatever_changes_the_tokens_makes_them_anew(tmp_path, tokenised, part):
    change, settings = KEY_PARTS[part]
    path = write_pairs(tmp_path / "rows.jsonl", 6)
    before = load(path)
    tokenised()
    path = (change(path) if change else None) or path
    load(path, **settings)
    assert len(tokenised()) == settings.get("max_samples", 6)
    load(path, **settings)
    assert tokenised() == []
    if part != "content":
        # The first set is still there.
        path.rename(tmp_path / "rows.jsonl")
        assert load(tmp_path / "rows.jsonl").fingerprint == before.fingerprint
        assert tokenised() == []


def test_other_settings_share_the_file(tmp_path, tokenised):
    path = write_pairs(tmp_path / "rows.jsonl", 6)
    tokenizer = tiny_tokenizer()
    load(path, tokenizer)
    tokenised()
    # As an ordinary call leaves a tokenizer.
    tokenizer(["a", "b c d"], padding=True, truncation=True, max_length=2)
    load(path, tokenizer, learning_rate=1e-3, seed=4, dataset_num_proc=1, output_dir="elsewhere")
    assert tokenised() == []


def test_a_template_that_writes_the_date_is_rendered_every_day(tmp_path, tokenised, monkeypatch):
    tokenizer = tiny_tokenizer(template="{{ strftime_now('%d %b %Y') }}" + CHAT)
    path = write_rows(tmp_path / "rows.jsonl", MIXED[7:8])
    load(path, tokenizer)
    assert len(tokenised()) == 1

    class Tomorrow(datetime.date):
        @classmethod
        def today(cls):
            return datetime.date(2031, 2, 3)

    monkeypatch.setattr(cache.datetime, "date", Tomorrow)
    load(path, tokenizer)
    assert len(tokenised()) == 1


def test_new_code_makes_new_files(tmp_path, tokenised, monkeypatch):
    path = write_pairs(tmp_path / "rows.jsonl", 6)
    load(path)
    for name in ("outcome.py", "render.py"):
        (tmp_path / name).write_text("# changed\n")
    monkeypatch.setattr(cache, "__file__", str(tmp_path / "cache.py"))
    tokenised()
    load(path)
    assert len(tokenised()) == 6


def flip_a_byte(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize(
    "damage",
    [flip_a_byte, lambda p: p.write_bytes(p.read_bytes()[:-9]), lambda p: p.write_bytes(b"")],
    ids=["a flipped bit", "cut short", "empty"],
)
def test_a_damaged_file_is_made_anew(tmp_path, folder, tokenised, caplog, damage):
    path = write_pairs(tmp_path / "rows.jsonl", 6)
    before = load(path)
    (file,) = folder.glob("*.arrow")
    whole = file.read_bytes()
    damage(file)
    tokenised()
    assert load(path).fingerprint == before.fingerprint
    assert len(tokenised()) == 6
    assert f"{file} is damaged" in caplog.text
    assert file.read_bytes() == whole


def no_folder(tmp_path, monkeypatch, _):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "file"))


def full_disk(tmp_path, _, key):
    (tmp_path / "cache" / "ds_stochdpo" / f".{key}.partial").symlink_to("/dev/full")


@pytest.mark.parametrize("obstacle", [no_folder, full_disk])
def test_a_cache_that_cannot_be_written_stops_nothing(tmp_path, folder, monkeypatch, caplog, obstacle):
    path = write_pairs(tmp_path / "rows.jsonl", 6)
    want = load(path)
    file = next(folder.glob("*.arrow"))
    file.unlink()
    obstacle(tmp_path, monkeypatch, file.name.split("-")[0])
    got = load(path)
    assert (got.fingerprint, got.counts) == (want.fingerprint, want.counts)
    assert caplog.text.count("cannot be kept") == 1
    assert list(folder.glob("*")) == list(folder.glob("*.lock"))


def test_rows_that_change_while_they_are_read_are_not_kept(tmp_path, folder, monkeypatch, caplog):
    path = write_pairs(tmp_path / "rows.jsonl", 6)
    call = RowTokeniser.__call__

    def touched(self, row, source):
        os.utime(path, ns=(1, 1))
        return call(self, row, source)

    monkeypatch.setattr(RowTokeniser, "__call__", touched)
    assert load(path).counts["used"] == 6
    assert "changed while they were read" in caplog.text
    assert list(folder.glob("*.arrow")) == []


@pytest.fixture
def in_processes(monkeypatch):
    """Other processes start at once, and take three rows at a time."""
    monkeypatch.setattr(workers, "ALONE_S", 0.0)
    monkeypatch.setattr(workers, "BATCH_ROWS", 3)


@pytest.mark.usefixtures("in_processes")
@pytest.mark.parametrize("num_proc", [2, 3])
def test_several_processes_give_the_same_file(tmp_path, folder, tokenised, monkeypatch, capfd, num_proc):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    path = write_rows(tmp_path / "rows.jsonl", MIXED + pair_rows(20))
    alone = load(path, dataset_num_proc=1, data_errors="skip")
    assert len(tokenised()) == len(MIXED) + 20
    (file,) = folder.glob("*.arrow")
    whole = file.read_bytes()
    file.unlink()
    together = load(path, dataset_num_proc=num_proc, data_errors="skip")
    assert tokenised() == []
    assert file.read_bytes() == whole
    assert (together.fingerprint, together.counts) == (alone.fingerprint, alone.counts)
    # Nothing is said of the fork, by a library or by Python.
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("in_processes")
@pytest.mark.parametrize("num_proc", [1, 2])
def test_a_row_that_ends_the_run_is_the_first_one_and_leaves_no_lock(tmp_path, folder, num_proc):
    fatal = {"prompt": "p", "chosen": "text", "rejected": [assistant("a")]}
    path = write_rows(tmp_path / "rows.jsonl", [*pair_rows(8), fatal, *pair_rows(8), fatal])
    for _ in range(2):
        with pytest.raises(DataError, match=r"rows\.jsonl:9: chosen is a string but rejected is messages"):
            load(path, dataset_num_proc=num_proc)
        assert list(folder.glob("*")) == list(folder.glob("*.lock"))


@pytest.mark.usefixtures("in_processes")
def test_a_process_that_is_killed_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(RowTokeniser, "__call__", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(DataError, match=r"one of 2 tokenising processes was killed.*dataset_num_proc"):
        load(write_pairs(tmp_path / "rows.jsonl"), dataset_num_proc=2)


def take_part(path, connection):
    """A local rank, in a process of its own: loads slowly, and sends what it tokenised, logged and got."""
    call, done, said = RowTokeniser.__call__, [], []

    def slow(self, row, source):
        time.sleep(0.1)
        done.append(source)
        return call(self, row, source)

    RowTokeniser.__call__ = slow
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("ds_stochdpo").addHandler(handler)
    loaded = load(path)
    connection.send((len(done), said, loaded.fingerprint, [pair.source for pair in loaded.pairs]))


def test_of_two_processes_one_makes_the_pairs_and_the_other_waits(tmp_path):
    path = write_pairs(tmp_path / "rows.jsonl", 12)
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    ranks = [context.Process(target=take_part, args=(path, sender), daemon=True) for _, sender in pipes]
    for rank in ranks:
        rank.start()
    reports = [receiver.recv() if receiver.poll(60) else None for receiver, _ in pipes]
    for rank in ranks:
        rank.kill()
        rank.join()
    assert None not in reports
    worked, waited = sorted(reports, reverse=True)
    assert (worked[0], waited[0]) == (12, 0)
    assert sum("waiting for it" in line for line in worked[1]) == 0
    assert sum("waiting for it" in line for line in waited[1]) == 1
    assert worked[2:] == waited[2:]
    assert len(worked[3]) == 12
