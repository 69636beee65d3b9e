"""Runs of one process that stop, go on, or refuse to: settings, last steps, order, schedule and disks."""

import contextlib
import json
import logging
import os
import re
import shutil
import signal
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file

from ds_stochdpo import CheckpointError, ConfigError, StochDPOConfig, StochDPOError, initialize
from ds_stochdpo.engine.completeness import MARKER, find_damage
from ds_stochdpo.engine.universal import check_convertible
from ds_stochdpo.errors import Interrupted
from ds_stochdpo.train import run
from ds_stochdpo.train.loop import TrainLoop
from tests.tiny import pair_rows, tiny_llama, tiny_tokenizer, write_pairs, write_rows

ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-4, "torch_adam": True}}


@pytest.fixture(scope="module")
def job(tmp_path_factory, single_process):
    folder = tmp_path_factory.mktemp("job")
    tokenizer = tiny_tokenizer()
    tiny_llama(len(tokenizer), num_hidden_layers=1).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_pairs(folder / "pairs.jsonl", 6)
    (folder / "zero1.json").write_text(json.dumps({"optimizer": ADAMW, "zero_optimization": {"stage": 1}}))
    (folder / "zero3.json").write_text(json.dumps({"optimizer": ADAMW, "zero_optimization": {"stage": 3}}))
    return folder


@pytest.fixture
def train(job, single_process, monkeypatch):
    """Runs the training script's own function inside the process group of the tests, without its report."""
    monkeypatch.setattr(run, "process_group", lambda *_: contextlib.nullcontext(single_process))
    monkeypatch.setattr(run, "write_report", lambda folder: None)
    monkeypatch.chdir(job)

    def start(name, **settings):
        values = {
            "model_name_or_path": "model",
            "dataset_name": "pairs.jsonl",
            "reference_cache_dir": "cache",
            "output_dir": str(name),
            "deepspeed": "zero1.json",
            "per_device_train_batch_size": 2,
            "branch": "single",
            "position_keep": 0.5,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 2,
            "weight_decay": 0.1,
            "log_draws": True,
            "max_steps": 7,
            **settings,
        }
        run.run_training(StochDPOConfig(**values))
        return job / name

    return start


@pytest.fixture
def saved(job, train):
    """A finished run of 7 steps with a checkpoint every 3: made once, then copied."""
    if not (job / "saved").exists():
        train("saved", save_steps=3)
    copy = job / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(job / "saved", copy)
    return copy


def checkpoints(folder):
    return sorted(p.name for p in folder.glob("checkpoint-*") if find_damage(p) is None)


def logged(folder, name="metrics.jsonl"):
    parsed = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in parsed]


def test_the_last_step_is_saved_whatever_the_interval(saved, train):
    assert checkpoints(saved) == ["checkpoint-3", "checkpoint-6", "checkpoint-7"]
    seldom = train("seldom", save_steps=100, save_total_limit=1)
    assert checkpoints(seldom) == ["checkpoint-7"]
    assert (seldom / "model.safetensors").exists()


@pytest.mark.parametrize("step", [3, 6, 7])
def test_order_rate_and_weights_go_on(job, saved, train, step):
    """Steps 3 and 6 are ends of an epoch; step 7 is the end, from which only the export is left."""
    for later in (3, 6, 7):
        if later > step:
            shutil.rmtree(saved / f"checkpoint-{later}")
    # The reference is scored again, by the policy as it was before training.
    shutil.rmtree(job / "cache", ignore_errors=True)
    train("copy", save_steps=3, resume_from_checkpoint="latest")
    assert logged(saved) == logged(job / "saved")
    assert [line["learning_rate"] for line in logged(saved)] == pytest.approx(
        [0.0, 5e-4, *(5e-4 * (1 + torch.cos(torch.tensor(k * torch.pi / 5)).item()) for k in range(5))]
    )
    seen = [(line["step"], line["pair_id"]) for line in logged(saved, "draws.jsonl")]
    assert seen == [(line["step"], line["pair_id"]) for line in logged(job / "saved", "draws.jsonl")]
    assert sorted(pair for step, pair in seen if 4 <= step <= 6) == list(range(6))
    for name, value in load_file(job / "saved" / "model.safetensors").items():
        assert torch.equal(load_file(saved / "model.safetensors")[name], value), name


def test_a_stream_goes_on(job, train):
    settings = {"streaming": True, "reference": "none", "save_steps": 3}
    whole = train("stream", **settings)
    shutil.copytree(whole, job / "stream-copy")
    for step in (6, 7):
        shutil.rmtree(job / "stream-copy" / f"checkpoint-{step}")
    with pytest.raises(CheckpointError, match=r"data: saved files pairs.jsonl.*given files pairs.jsonl.*max_samples 4"):
        train("stream-copy", **settings, resume_from_checkpoint="latest", max_samples=4)
    resumed = train("stream-copy", **settings, resume_from_checkpoint="latest")
    assert logged(resumed) == logged(whole)
    assert logged(resumed, "draws.jsonl") == logged(whole, "draws.jsonl")


CHANGES = {
    "beta": ({"beta": 0.2}, "beta: saved 0.1, given 0.2"),
    "a line less": ({"dataset_name": "less.jsonl"}, "data: saved pairs 6, fingerprint .*, given pairs 5"),
    "accumulation": ({"gradient_accumulation_steps": 2}, "pairs_per_step: saved 2, given 4"),
    "seed": ({"seed": 1}, "seed: saved 0, given 1"),
    "model": ({"model_name_or_path": "other"}, "model: saved [0-9a-f]{12}, given [0-9a-f]{12}"),
    "optimizer": ({"deepspeed": "other.json"}, "optimizer: saved .*eps 0.0001.*, given .*eps 0.01"),
    "two": ({"beta": 0.2, "seed": 1}, "beta: saved 0.1, given 0.2\n  seed: saved 0, given 1"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_settings_are_refused_before_the_model_is_loaded(job, saved, train, monkeypatch, name):
    write_rows(job / "less.jsonl", pair_rows(6)[:4] + pair_rows(6)[5:])
    if not (job / "other").exists():
        shutil.copytree(job / "model", job / "other")
        weights = load_file(job / "other" / "model.safetensors")
        save_file({k: v + 1e-3 for k, v in weights.items()}, job / "other" / "model.safetensors", {"format": "pt"})
    other = {"type": "AdamW", "params": {**ADAMW["params"], "eps": 1e-2}}
    (job / "other.json").write_text(json.dumps({"optimizer": other, "zero_optimization": {"stage": 1}}))
    monkeypatch.setattr(run, "load_policy", lambda *_, **__: pytest.fail("the model was loaded"))
    settings, said = CHANGES[name]
    before = (saved / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=said):
        train("copy", save_steps=3, resume_from_checkpoint="latest", **settings)
    assert (saved / "metrics.jsonl").read_bytes() == before


def test_an_override_is_recorded_and_settings_that_do_not_matter_are_free(saved, train, caplog):
    shutil.rmtree(saved / "checkpoint-7")
    settings = {"resume_from_checkpoint": "latest", "beta": 0.2, "seed": 1}
    with pytest.raises(ConfigError, match=r"resume_override names betta; it can name .*beta"):
        train("copy", **settings, resume_override="betta")
    with pytest.raises(CheckpointError, match="seed: saved 0, given 1"):
        train("copy", **settings, resume_override="beta")
    free = {"logging_steps": 2, "log_draws": False, "score_chunk_rows": 8}
    train("copy", **settings, **free, resume_override="beta, seed")
    (start,) = json.loads((saved / "run.json").read_text())["resumed"]
    assert start["step"] == 6
    assert start["changes"] == {"beta": [0.1, 0.2], "seed": [0, 1], "score_chunk_rows": [256, 8]}
    assert "another score_chunk_rows: saved 256, given 8" in caplog.text


def test_an_overridden_rate_and_decay_are_those_of_the_steps(job, saved, train):
    """Another rate scales what is left of the schedule; the files' own rate and decay would take its place."""
    faster = {"type": "AdamW", "params": {**ADAMW["params"], "lr": 2e-3}}
    (job / "faster.json").write_text(json.dumps({"optimizer": faster, "zero_optimization": {"stage": 1}}))
    shutil.rmtree(saved / "checkpoint-7")
    settings = {"deepspeed": "faster.json", "resume_from_checkpoint": "latest"}
    train("copy", **settings, weight_decay=1000.0, resume_override="learning_rate,weight_decay")
    before, after = logged(job / "saved")[-1], logged(saved)[-1]
    assert after["learning_rate"] == pytest.approx(2 * before["learning_rate"])
    assert after["loss"] == before["loss"]
    slow, fast = (load_file(job / name / "model.safetensors") for name in ("saved", "copy"))
    name, rate = "model.layers.0.mlp.up_proj.weight", after["learning_rate"]
    # Decay takes rate x 1000 of each weight; Adam moves each by about the rate.
    torch.testing.assert_close(fast[name], (1 - 1000 * rate) * slow[name], rtol=0, atol=3 * rate)
    assert (fast[name] - slow[name]).abs().max() > 10 * rate


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"weight_decay": 0.0}, r"another weight_decay \(from or to 0\): saved True, given False"),
        ({"bf16": True}, "another bf16: saved False, given True"),
        ({"deepspeed": "sgd.json"}, "another optimizer.type: saved AdamW, given SGD"),
    ],
)
def test_what_no_override_allows(job, saved, train, settings, words):
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 1}}
    (job / "sgd.json").write_text(json.dumps(sgd))
    with pytest.raises(CheckpointError, match=words):
        train("copy", resume_from_checkpoint="latest", resume_override="true", **settings)


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(job, saved, train, caplog):
    (saved / "checkpoint-7" / MARKER).unlink()
    shard = next((saved / "checkpoint-6" / "deepspeed").glob("*optim*"))
    os.truncate(shard, 100)
    with pytest.raises(CheckpointError, match=r"no complete checkpoint: it has no complete.json.*checkpoint-3"):
        train("copy", resume_from_checkpoint="copy/checkpoint-7")
    train("copy", save_steps=3, save_total_limit=2, resume_from_checkpoint="latest")
    for words in (r"checkpoint-7 \(it has no complete", r"checkpoint-6 \(.*optim_states.pt has 100 bytes"):
        assert re.search(words, caplog.text), words
    assert logged(saved) == logged(job / "saved")
    assert checkpoints(saved) == ["checkpoint-6", "checkpoint-7"]


def test_a_checkpoint_of_the_python_api_is_refused_by_the_script(job, train):
    lm = tiny_llama(num_hidden_layers=1)
    config = StochDPOConfig(per_device_train_batch_size=2)
    deepspeed = {"optimizer": ADAMW, "zero_optimization": {"stage": 1}}
    initialize(model=lm, config=config, deepspeed=deepspeed).save_checkpoint(job / "api")
    with pytest.raises(CheckpointError, match=r"saved by the Python API.*engine.load_checkpoint"):
        train("from-api", resume_from_checkpoint="api")


def test_nothing_complete_is_an_error(saved, train):
    for step in (3, 6, 7):
        (saved / f"checkpoint-{step}" / MARKER).unlink()
    with pytest.raises(CheckpointError, match=r"no complete checkpoint: .*checkpoint-7 \(.*checkpoint-3 \("):
        train("copy", resume_from_checkpoint="latest")


def test_a_missing_generator_file_is_a_warning(job, saved, train, caplog):
    shutil.rmtree(saved / "checkpoint-7")
    marker = json.loads((saved / "checkpoint-6" / MARKER).read_text())
    shutil.rmtree(saved / "checkpoint-6" / "rng")
    marker["files"] = {name: record for name, record in marker["files"].items() if not name.startswith("rng")}
    (saved / "checkpoint-6" / MARKER).write_text(json.dumps(marker))
    train("copy", save_steps=3, resume_from_checkpoint="latest")
    assert "random generators not restored" in caplog.text
    assert logged(saved) == logged(job / "saved")


def test_a_file_that_would_run_code_is_not_loaded(saved, train, tmp_path):
    """The marker knows sizes and hashes, but whoever can write the folder can write those too."""

    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    target = saved / "checkpoint-7" / "deepspeed" / "mp_rank_00_model_states.pt"
    torch.save({"module": Payload()}, target)
    marker = json.loads((saved / "checkpoint-7" / MARKER).read_text())
    del marker["files"][f"deepspeed/{target.name}"]
    (saved / "checkpoint-7" / MARKER).write_text(json.dumps(marker))
    with pytest.raises(CheckpointError, match=r"checkpoint-7 cannot be loaded .*mkdir"):
        train("copy", resume_from_checkpoint="latest")
    assert not (tmp_path / "ran").exists()


def test_newer_checkpoints_stay_until_the_chosen_one_is_loaded(saved, train):
    """The marker's digests would tell of the damage before; whoever mends a marker by hand has none."""
    (target,) = (saved / "checkpoint-3" / "deepspeed").glob("*optim_states.pt")
    target.write_bytes(target.read_bytes()[:-100] + bytes(100))
    marker = json.loads((saved / "checkpoint-3" / MARKER).read_text())
    del marker["files"][f"deepspeed/{target.name}"]
    (saved / "checkpoint-3" / MARKER).write_text(json.dumps(marker))
    older = {"resume_from_checkpoint": "copy/checkpoint-3", "overwrite_output_dir": True}
    with pytest.raises(CheckpointError, match=r"checkpoint-3 cannot be loaded: one of its files is damaged inside"):
        train("copy", save_steps=3, **older)
    assert checkpoints(saved)[1:] == ["checkpoint-6", "checkpoint-7"]
    train("copy", save_steps=100, **older | {"resume_from_checkpoint": "copy/checkpoint-6"})
    assert checkpoints(saved) == ["checkpoint-3", "checkpoint-6", "checkpoint-7"]
    assert json.loads((saved / "run.json").read_text())["resumed"][-1]["step"] == 6


def stop_at(step, monkeypatch):
    """What SIGTERM does: the watcher of a rank wishes to stop while this optimizer step is under way."""
    inner = TrainLoop.train_step

    def train_step(loop):
        loop.engine.watch.wanted = signal.SIGTERM if loop.engine.step == step - 1 else 0
        return inner(loop)

    monkeypatch.setattr(TrainLoop, "train_step", train_step)


def test_an_evaluation_that_a_stop_came_before_is_made_up_for(job, train, monkeypatch):
    settings = {"save_steps": 100, "eval_steps": 2, "dataset_test_split": "pairs.jsonl", "max_steps": 5}
    train("evaluated", **settings)
    with monkeypatch.context() as patch:
        stop_at(4, patch)
        with pytest.raises(Interrupted, match="checkpoint-4 is complete"):
            train("stopped", **settings)
    assert json.loads((job / "stopped" / "run.json").read_text())["exit_code"] == 143
    train("stopped", **settings, resume_from_checkpoint="latest")
    assert logged(job / "stopped") == logged(job / "evaluated")
    assert [line["step"] for line in logged(job / "stopped") if "eval_loss" in line] == [0, 2, 4, 5]


def test_run_again_without_a_word_with_resume_and_with_overwrite(job, saved, train, caplog):
    caplog.set_level(logging.INFO)
    before = {p: p.read_bytes() for p in saved.rglob("*") if p.is_file()}
    with pytest.raises(ConfigError, match="holds an earlier run"):
        train("copy", save_steps=3)
    assert {p: p.read_bytes() for p in saved.rglob("*") if p.is_file()} == before
    train("copy", save_steps=3, overwrite_output_dir=True, max_steps=2)
    assert "checkpoint-6" in caplog.text
    assert checkpoints(saved) == ["checkpoint-2"]
    assert [line["step"] for line in logged(saved)] == [1, 2]
    assert json.loads((saved / "run.json").read_text())["resumed"] == []


def test_stages_that_cannot_be_converted_are_refused_before_the_model_is_loaded(saved, train, monkeypatch):
    monkeypatch.setattr(run, "load_policy", lambda *_, **__: pytest.fail("the model was loaded"))
    with pytest.raises(CheckpointError, match=r"1 rank\(s\) at ZeRO stage 1; .*cannot convert.*model_name_or_path"):
        train("copy", save_steps=3, resume_from_checkpoint="latest", deepspeed="zero3.json")


@pytest.mark.parametrize(
    ("saved_by", "now", "words"),
    [
        ({"zero_stage": 3, "world_size": 2, "optimizer": "AdamW"}, (3, 1), None),
        ({"zero_stage": 1, "world_size": 2, "optimizer": "AdamW"}, (2, 3), None),
        ({"zero_stage": 0, "world_size": 2, "optimizer": "SGD"}, (0, 1), None),
        ({"zero_stage": 3, "world_size": 2, "optimizer": "SGD"}, (3, 2), None),
        ({"zero_stage": 3, "world_size": 2, "optimizer": "SGD"}, (3, 1), "not SGD's"),
        ({"zero_stage": 2, "world_size": 2, "optimizer": "AdamW"}, (3, 2), "2 rank.s. at ZeRO stage 2; this run has 2"),
        ({"zero_stage": 0, "world_size": 1, "optimizer": "AdamW"}, (1, 1), "cannot convert between these stages"),
    ],
)
def test_what_can_be_converted(tmp_path, saved_by, now, words):
    stage, world_size = now
    expected = pytest.raises(CheckpointError, match=words) if words else contextlib.nullcontext()
    with expected:
        check_convertible(saved_by, tmp_path, stage=stage, world_size=world_size)


@contextlib.contextmanager
def small_disk(folder, size):
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root and the right to mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_fills_up_during_a_save(job, saved, train, tmp_path, caplog):
    size = sum(p.stat().st_size for p in (saved / "checkpoint-3").rglob("*") if p.is_file())
    with small_disk(tmp_path / "disk", int(1.5 * size)) as disk:
        with pytest.raises(
            CheckpointError, match=r"no room for another checkpoint in .*: the last one has \d+ bytes, "
        ):
            train(disk / "run", save_steps=3, save_total_limit=1)
        assert "2 checkpoints need about" in caplog.text
        assert checkpoints(disk / "run") == ["checkpoint-3"]
        # In a process that does not know the size yet the write itself fails.
        with pytest.raises(CheckpointError, match=r"checkpoint-6 cannot be written \(rank 0: .*older checkpoints are"):
            train(disk / "run", save_steps=3, save_total_limit=1, resume_from_checkpoint="latest")
        assert checkpoints(disk / "run") == ["checkpoint-3"]
        assert not list((disk / "run").glob(".checkpoint-*"))
        kept = tmp_path / "kept"
        shutil.copytree(disk / "run", kept)
    train(kept, save_steps=3, resume_from_checkpoint="latest")
    assert logged(kept) == logged(job / "saved")


def test_metrics_on_a_full_disk(tmp_path):
    from ds_stochdpo.train.record import RunRecord

    with small_disk(tmp_path / "disk", 16 * 1024) as disk:
        record = RunRecord(disk, writes=True)
        with pytest.raises(StochDPOError, match=r"metrics.jsonl cannot be written: No space left on device \(0 bytes"):
            consume(record.metrics({"step": step}) for step in range(10_000))


def consume(items):
    for _ in items:
        pass
