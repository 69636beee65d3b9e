"""Whose output_dir it is: refused, continued or started afresh, and never touched before that is decided."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from ds_stochdpo import ConfigError, StochDPOConfig
from ds_stochdpo.engine.completeness import partial_name, publish
from ds_stochdpo.train.output_dir import claim_for, hold_output_dir
from ds_stochdpo.train.record import RunRecord


def claim(folder, **settings):
    return claim_for(StochDPOConfig(output_dir=str(folder), **settings))


def names(paths):
    return sorted(path.name for path in paths)


def make_checkpoint(folder, step, content=b"x"):
    """A complete checkpoint folder whose only file is foreign to DeepSpeed."""
    path = folder / f"checkpoint-{step}"
    partial_name(path).mkdir(parents=True)
    (partial_name(path) / "state.json").write_bytes(content)
    publish(partial_name(path), path)
    return path


@pytest.fixture
def earlier(tmp_path):
    """What a finished run leaves, beside files of other origin."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("metrics.jsonl", "run.json", "model.safetensors", "config.json", "train.log", "vectors.safetensors"):
        (folder / name).write_text("{}")
    for step in (4, 8, 12):
        make_checkpoint(folder, step)
    return folder


def test_a_new_folder_and_one_with_other_files_are_free(tmp_path):
    assert claim(tmp_path / "new").stale == []
    (tmp_path / "train.log").write_text("only a log")
    assert claim(tmp_path).stale == []


def test_what_a_start_that_failed_has_left_is_no_result(tmp_path):
    (tmp_path / "run.json").write_text('{"finished": false}')
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / ".checkpoint-4.partial").mkdir()
    assert names(claim(tmp_path).stale) == [".checkpoint-4.partial", "metrics.jsonl", "run.json"]


def test_an_earlier_run_is_refused_and_stays_as_it_is(earlier):
    before = {path: path.read_bytes() for path in earlier.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"resume_from_checkpoint: latest.*overwrite_output_dir: true"):
        claim(earlier)
    assert {path: path.read_bytes() for path in earlier.rglob("*") if path.is_file()} == before


def test_overwriting_says_what_goes(earlier, caplog):
    caplog.set_level("INFO")
    stale = claim(earlier, overwrite_output_dir=True).stale
    RunRecord(earlier, writes=True, stale=stale)
    # The model stays until the export replaces it, and foreign files stay for good.
    assert names(earlier.iterdir()) == ["config.json", "model.safetensors", "train.log", "vectors.safetensors"]
    for name in ("metrics.jsonl", "run.json", "checkpoint-4", "checkpoint-12"):
        assert name in caplog.text


def test_continuing_touches_nothing_but_what_a_broken_save_has_left(earlier):
    (earlier / ".checkpoint-16.partial").mkdir()
    for word in ("latest", str(earlier), str(earlier / "checkpoint-12")):
        found = claim(earlier, resume_from_checkpoint=word)
        assert found.continues
        assert names(found.stale) == [".checkpoint-16.partial"]


def test_an_older_checkpoint_lets_newer_ones_go_only_if_told(earlier):
    settings = {"resume_from_checkpoint": str(earlier / "checkpoint-4")}
    with pytest.raises(ConfigError, match="checkpoint-12 in the same output_dir is newer"):
        claim(earlier, **settings)
    found = claim(earlier, **settings, overwrite_output_dir=True)
    assert found.continues
    assert names(found.newer) == ["checkpoint-12", "checkpoint-8"]


def test_a_checkpoint_of_another_folder_starts_new_files(earlier, tmp_path):
    settings = {"resume_from_checkpoint": str(earlier / "checkpoint-4")}
    found = claim(tmp_path / "other", **settings)
    assert (found.stale, found.continues) == ([], False)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match="holds an earlier run"):
        claim(tmp_path / "other", **settings)


def test_latest_before_the_first_checkpoint_starts_over(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    found = claim(tmp_path, resume_from_checkpoint="latest")
    assert (names(found.stale), found.continues) == (["metrics.jsonl"], False)
    # A finished run without checkpoints is another matter.
    (tmp_path / "model.safetensors").write_text("x")
    with pytest.raises(ConfigError, match="holds an earlier run"):
        claim(tmp_path, resume_from_checkpoint="latest")


def test_a_run_never_writes_over_what_it_reads(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match="which is model_name_or_path too"):
        claim(
            tmp_path / "other" / ".." / "model",
            overwrite_output_dir=True,
            model_name_or_path=str(tmp_path / "model"),
            dataset_name="some/hub-name",
        )


def test_an_output_dir_that_cannot_be_one(tmp_path, single_process):
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="is a file"):
            claim(folder, overwrite_output_dir=True)
    for folder in ("/proc/ds_stochdpo", "/dev/null/run"):
        with pytest.raises(ConfigError, match="cannot be written"), hold_output_dir(Path(folder), single_process):
            pass


def test_two_runs_at_once_are_kept_apart(tmp_path, single_process):
    with hold_output_dir(tmp_path, single_process):
        with pytest.raises(ConfigError, match="another run is writing now"), hold_output_dir(tmp_path, single_process):
            pass
        assert not list(tmp_path.glob(".seen*"))
    with hold_output_dir(tmp_path, single_process):
        pass


def test_ranks_that_see_different_folders_are_named(tmp_path, monkeypatch, single_process):
    """Rank 1 of another machine is played by what it would say."""
    monkeypatch.setattr("ds_stochdpo.train.output_dir._SECONDS_FOR_A_FILE", 0.0)
    ranks = SimpleNamespace(
        on_main=single_process.on_main,
        is_main=True,
        gather_objects=lambda own: [own, (False, "node2", "/local/run")],
    )
    with pytest.raises(ConfigError, match=r"rank 1 \(node2: /local/run\) cannot see"), hold_output_dir(tmp_path, ranks):
        pass


def test_lines_after_the_checkpoint_are_cut_off(tmp_path, caplog):
    record = RunRecord(tmp_path, writes=True)
    for step in (1, 2, 3):
        record.metrics({"step": step})
    assert record.flush() == {"metrics.jsonl": 3}
    # As a full disk or a kill leaves it.
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4')
    again = RunRecord(tmp_path, writes=True)
    again.cut({"metrics.jsonl": 2, "draws.jsonl": 0})
    again.metrics({"step": 3, "new": 1})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1}, {"step": 2}, {"step": 3, "new": 1}]
    assert again.flush()["metrics.jsonl"] == 3
    again.cut({"metrics.jsonl": 7})
    assert "has 3 lines, but the checkpoint was saved after 7" in caplog.text
