"""Checkpoints by the Python API: the engine goes on exactly, and knows that its weights are no reference any more."""

import json
import os

import pytest

import ds_stochdpo
from ds_stochdpo import CheckpointError, ConfigError
from ds_stochdpo.engine import checkpoint, export
from tests.multiproc import cases

pytestmark = pytest.mark.usefixtures("single_process")

STEPS = cases.step_pairs(steps=3)


HOST = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


def engine(stage=3, zero=None, **settings):
    config = ds_stochdpo.StochDPOConfig(per_device_train_batch_size=8, beta=cases.BETA, **cases.PRUNED, **settings)
    lm = cases.model(layers=2)
    lm = lm.bfloat16() if settings.get("bf16") else lm
    ds = {**cases.deepspeed_json(stage, cases.ADAMW, **(zero or {})), "zero_force_ds_cpu_optimizer": False}
    return ds_stochdpo.initialize(model=lm, config=config, deepspeed=ds)


def without_times(metrics):
    return {name: value for name, value in metrics.items() if not name.startswith(("time/", "memory/"))}


@pytest.mark.parametrize(
    "options", [{}, {"bf16": True}, {"zero": HOST}, {"bf16": True, "zero": HOST}], ids=["fp32", "bf16", "host", "both"]
)
def test_an_engine_goes_on_where_another_was_saved(tmp_path, options):
    first = engine(**options)
    first.epoch = 2
    first.train_step(STEPS[0])
    # Evaluating leaves gathers under way, which must not get in the way of saving.
    first.evaluate(STEPS[1])
    first.save_checkpoint(tmp_path / "saved")
    expected = [without_times(first.train_step(pairs)) for pairs in STEPS[1:]]
    second = engine(**options)
    second.evaluate(STEPS[1])
    second.load_checkpoint(tmp_path / "saved")
    assert (second.step, second.epoch) == (1, 2)
    assert [without_times(second.train_step(pairs)) for pairs in STEPS[1:]] == expected
    with pytest.raises(ConfigError, match="the policy has already been trained"):
        ds_stochdpo.add_reference(second, STEPS[0])


def test_state_of_another_format_stage_or_step_is_refused(tmp_path):
    saved = tmp_path / "saved"
    engine().save_checkpoint(saved)
    with pytest.raises(CheckpointError, match=r"1 rank\(s\) at ZeRO stage 3; this run has 1 at 2"):
        engine(stage=2).load_checkpoint(saved)
    state = json.loads((saved / "state.json").read_text())
    for change, words in (
        ({"format": 9}, "has format 9; this version reads"),
        ({"step": 5}, "says .* step 5"),
    ):
        (saved / "state.json").write_text(json.dumps(state | change))
        record = {"format": 1, "files": {"state.json": {"bytes": (saved / "state.json").stat().st_size}}}
        (saved / "complete.json").write_text(json.dumps(record))
        with pytest.raises(CheckpointError, match=words):
            engine().load_checkpoint(saved)
    with pytest.raises(CheckpointError, match="is no complete checkpoint: there is no such folder"):
        engine().load_checkpoint(tmp_path / "nowhere")


def test_the_predicted_size_is_that_of_the_files(tmp_path):
    for stage in (0, 1, 3):
        saving = engine(stage)
        saving.train_step(STEPS[0])
        saving.save_checkpoint(tmp_path / f"zero{stage}")
        files = [p for p in (tmp_path / f"zero{stage}" / "deepspeed").iterdir() if p.is_file()]
        written = sum(p.stat().st_size for p in files)
        # Beside the tensors, the files hold names, settings and zip headers.
        assert checkpoint.state_bytes(saving) < written < checkpoint.state_bytes(saving) + 60_000


def test_an_export_that_was_broken_off_leaves_nothing_in_the_next(tmp_path, monkeypatch):
    one = engine(stage=0)
    with monkeypatch.context() as patch:
        patch.setattr(export, "_find_problem", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            export.export_model(one.module.lm, tmp_path, one.ranks, max_shard_size=20_000)
    assert list((tmp_path / export.PARTIAL_NAME).iterdir())
    one.export(tmp_path)
    assert [p.name for p in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]


def test_half_a_model_over_another_one_does_not_load(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    one = engine(stage=0)
    export.export_model(one.module.lm, tmp_path, one.ranks, max_shard_size=20_000)
    moved, inner = [], os.replace

    def replace(source, target):
        moved.append(target)
        if len(moved) == 2:
            raise KeyboardInterrupt
        inner(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(export.os, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            export.export_model(one.module.lm, tmp_path, one.ranks, max_shard_size=20_000)
    with pytest.raises(OSError, match="no file named"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    export.export_model(one.module.lm, tmp_path, one.ranks, max_shard_size=20_000)
    AutoModelForCausalLM.from_pretrained(tmp_path)
