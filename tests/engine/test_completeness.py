"""A checkpoint folder is whole or no checkpoint: every way in which it can be damaged is seen and said."""

import contextlib
import itertools
import json
import os

import pytest

from ds_stochdpo.engine import completeness
from ds_stochdpo.engine.completeness import MARKER, discard, find_damage, partial_name, publish


def write(folder, content=b"small"):
    partial = partial_name(folder)
    (partial / "deepspeed").mkdir(parents=True)
    (partial / "deepspeed" / "weights.pt").write_bytes(bytes(2**20 + 5))
    (partial / "state.json").write_bytes(content)
    return partial


@pytest.fixture
def whole(tmp_path):
    folder = tmp_path / "checkpoint-4"
    publish(write(folder), folder)
    return folder


def test_a_published_folder_is_whole(whole):
    assert find_damage(whole) is None
    assert sorted(p.name for p in whole.parent.iterdir()) == ["checkpoint-4"]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: (f / MARKER).unlink(), "no complete.json, so saving it was not finished"),
        (lambda f: (f / MARKER).write_text("{"), "complete.json cannot be read"),
        (lambda f: (f / MARKER).write_text('{"format": 1}'), "complete.json cannot be read"),
        (lambda f: (f / MARKER).write_text('{"format": 9, "files": {}}'), "has format 9, not 1"),
        (lambda f: (f / MARKER).write_text('{"format": 1, "files": {"a": 5}}'), "complete.json cannot be read"),
        (lambda f: (f / MARKER).write_text('{"format": 1, "files": {}}'), "complete.json names no file"),
        (lambda f: (f / "state.json").unlink(), "state.json is missing"),
        # The end of a large file of torch holds the checksums of its tensors.
        (lambda f: (f / "deepspeed" / "weights.pt").write_bytes(bytes(2**20 + 4) + b"x"), "pt has other content"),
        (lambda f: (f / "state.json").write_bytes(b"other"), "state.json has other content"),
        (lambda f: os.truncate(f / "deepspeed" / "weights.pt", 4), "weights.pt has 4 bytes, not 1048581"),
        (discard, "there is no such folder"),
    ],
)
def test_damage_is_named(whole, damage, said):
    damage(whole)
    assert said in find_damage(whole)


def test_a_link_goes_and_what_it_leads_to_stays(whole, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(whole)
    discard(link)
    assert not link.exists()
    assert find_damage(whole) is None
    link.symlink_to(whole)
    publish(write(link, b"new"), link)
    assert not link.is_symlink()
    assert (link / "state.json").read_bytes() == b"new"
    assert (find_damage(whole), (whole / "state.json").read_bytes()) == (None, b"small")


def test_a_folder_that_is_replaced_stays_until_the_new_one_is_written(whole, monkeypatch):
    before = (whole / "state.json").read_bytes()

    def refuse(*_):
        raise OSError(28, "No space left on device")

    partial = write(whole, b"new")
    with monkeypatch.context() as patch:
        patch.setattr(completeness, "flush_folder", refuse)
        with pytest.raises(OSError, match="No space"):
            publish(partial, whole)
    assert (whole / "state.json").read_bytes() == before
    assert find_damage(whole) is None
    publish(partial, whole)
    assert (whole / "state.json").read_bytes() == b"new"
    assert sorted(p.name for p in whole.parent.iterdir()) == ["checkpoint-4"]


def test_a_process_that_ends_in_between_leaves_no_checkpoint(tmp_path, monkeypatch):
    """Ended before each call that reaches the disk: whole only once the marker names every file."""
    ended_in_between = 0
    for survived in itertools.count():
        folder = tmp_path / str(survived) / "checkpoint-4"
        partial = write(folder)
        calls = iter(range(survived))
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            for name in ("fsync", "rename", "replace"):
                patch.setattr(os, name, ending(getattr(os, name), calls))
            publish(partial, folder)
            break
        if find_damage(folder) is None:
            assert set(json.loads((folder / MARKER).read_text())["files"]) == {"state.json", "deepspeed/weights.pt"}
        else:
            ended_in_between += 1
    assert ended_in_between >= 5
    assert find_damage(folder) is None


def ending(work, calls):
    """`work` until `calls` has no more; then what a signal does."""

    def call(*args, **options):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return work(*args, **options)

    return call
