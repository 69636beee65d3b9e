"""A checkpoint folder is whole or no checkpoint: every way in which it can be damaged is seen and said."""

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
        (lambda f: (f / "state.json").unlink(), "state.json is missing"),
        (lambda f: (f / "state.json").write_bytes(b"other"), "state.json has other content"),
        (lambda f: os.truncate(f / "deepspeed" / "weights.pt", 4), "weights.pt has 4 bytes, not 1048581"),
        (discard, "there is no such folder"),
    ],
)
def test_damage_is_named(whole, damage, said):
    damage(whole)
    assert said in find_damage(whole)


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


def test_the_marker_comes_last(tmp_path, monkeypatch):
    """A process that ends while the marker is written leaves a folder that is no checkpoint."""
    folder = tmp_path / "checkpoint-4"

    def end(*_):
        raise KeyboardInterrupt

    partial = write(folder)
    monkeypatch.setattr(completeness, "write_json", end)
    with pytest.raises(KeyboardInterrupt):
        publish(partial, folder)
    assert "not finished" in find_damage(folder)
