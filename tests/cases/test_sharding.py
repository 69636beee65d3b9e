"""Runs of the script on 2 ranks, one job: equal to one process, quiet, in step under ZeRO-3, and small at the end."""

import contextlib
import gc
import json
import os
import sys
from unittest import mock

import numpy as np
import pytest
import torch

from tests.cases.job import PRUNED, Done, assert_same, deepspeed_json, group_that_stands, write_models
from tests.multiproc import harness
from tests.tiny import pair_rows, write_rows

pytestmark = pytest.mark.multiproc

SETTINGS = {"learning_rate": 1e-3, "label_smoothing": 0.1, "log_draws": "true", "reference_cache_dir": "cache"}
IDENTICAL = {"prompt": "Name one.", "chosen": "It is one." + " Yes" * 5, "rejected": "No idea" + "!" * 20}
RUNS = {
    "exact": {"per_device_train_batch_size": 2, "ref_model_name_or_path": "other llama"},
    "pruned": {"per_device_train_batch_size": 2, "ref_model_name_or_path": "other llama", **PRUNED},
    "identical": {"dataset_name": "identical.jsonl", "position_keep": 0.5, "reference": "none"},
    "uneven": {"dataset_name": "seven.jsonl", "per_device_train_batch_size": 1, "num_train_epochs": 2, "save_steps": 4},
    "two models": {"dataset_name": "seven.jsonl", "per_device_train_batch_size": 1, "max_steps": 50,
                   "reference": "online", "ref_model_name_or_path": "other llama", "branch": "single"},
    "long": {"dataset_name": "seven.jsonl", "per_device_train_batch_size": 1, "max_steps": 200, "reference": "none",
             "deepspeed": "zero0.json"},
}  # fmt: skip
"""Runs of the script; `exact` and `pruned` take steps of 4 pairs."""
SHARD_BYTES = 100_000


def live_bytes():
    """Bytes of all tensors made since `gc.freeze`."""
    storages = {}
    for item in gc.get_objects():
        if isinstance(item, torch.Tensor):
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
    return sum(storages.values())


def export_under_watch(ranks, folder):
    """Largest sum of the tensors that an export in shards holds beside the model, and bytes of its largest tensor."""
    import ds_stochdpo
    from ds_stochdpo.engine import export
    from tests.tiny import tiny_llama

    lm = tiny_llama(num_hidden_layers=12)
    largest = max(p.numel() for p in lm.parameters()) * 4
    config = ds_stochdpo.StochDPOConfig(reference="none")
    engine = ds_stochdpo.initialize(model=lm, config=config, deepspeed=deepspeed_json())
    held, gathered = [], export._gathered

    @contextlib.contextmanager
    def watched(tensor):
        with gathered(tensor) as whole:
            yield whole
            held.append(live_bytes())

    gc.collect()
    gc.freeze()
    with mock.patch.object(export, "_gathered", watched):
        export.export_model(engine.module.lm, folder / "shards", ranks, max_shard_size=SHARD_BYTES)
    gc.unfreeze()
    return max(held), largest


def run_script(_, folder):
    """Worker: every run of `RUNS` as `launch/train.py` runs it, but in one process group; then a watched export."""
    from ds_stochdpo.engine import process_group
    from launch import train

    os.chdir(folder)
    with process_group() as ranks, group_that_stands():
        for name, settings in RUNS.items():
            arguments = {"model_name_or_path": "wide", "dataset_name": "pairs.jsonl", "output_dir": name,
                         "deepspeed": "zero3.json", **SETTINGS, **settings}  # fmt: skip
            sys.argv = ["train.py", *(part for key, value in arguments.items() for part in (f"--{key}", str(value)))]
            print(f"== {name}", flush=True)
            code = train.main()
            print(f"== end of {name}", flush=True)
            assert code == 0, name
        return export_under_watch(ranks, folder)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    write_models(folder)
    write_rows(folder / "pairs.jsonl", pair_rows())
    write_rows(folder / "seven.jsonl", pair_rows(7))
    write_rows(folder / "identical.jsonl", [IDENTICAL] * 24)
    # No gathering option for the export, and DeepSpeed says when it gives up a trace.
    zero = {"log_trace_cache_warnings": True}
    (folder / "zero3.json").write_text(json.dumps(deepspeed_json(zero_optimization=zero)))
    (folder / "zero0.json").write_text(json.dumps(deepspeed_json(0)))
    results, job = harness.run(run_script, 2, folder, limit_s=240)
    return results, job, {name: Done(folder / name) for name in RUNS}


def output_of(job, rank, name):
    """What one rank wrote to its log file in one run."""
    return job.outputs[rank].split(f"== {name}\n")[1].split(f"== end of {name}\n")[0]


@pytest.mark.parametrize("name", ["exact", "pruned"])
def test_two_ranks_take_the_steps_of_one(jobs, two_ranks, name):
    runs = two_ranks[2]
    settings = {
        k: v for k, v in RUNS[name].items() if k not in ("per_device_train_batch_size", "ref_model_name_or_path")
    }
    alone = jobs.run("wide", pair_rows(), deepspeed_json(0), label_smoothing=0.1, log_draws=True,
                     reference_model="other llama", **settings)  # fmt: skip
    assert len(alone.steps) == 6
    assert_same(runs[name], alone)
    assert runs[name].lines("draws.jsonl") == alone.lines("draws.jsonl")


def test_the_first_margin_is_zero_where_policy_and_reference_are_one_model(jobs, two_ranks):
    runs = two_ranks[2]
    named = jobs.run("wide", pair_rows(), max_steps=1, reference_model="wide", **PRUNED)
    for run in (runs["uneven"], named):
        assert abs(run.steps[0]["rewards/margins"]) < 1e-6
    assert abs(runs["pruned"].steps[0]["rewards/margins"]) > 1e-2


def test_identical_rows_are_sampled_apart_on_both_ranks(two_ranks):
    lines = two_ranks[2]["identical"].lines("draws.jsonl")
    assert sorted(line["pair_id"] for line in lines) == list(range(24))
    for side in ("chosen", "rejected"):
        assert len({str(line[side]["positions"]) for line in lines}) == 2
    by_step = {}
    for line in lines:
        by_step.setdefault(line["step"], []).append(str(line["chosen"]["positions"]))
    assert len({str(sorted(step)) for step in by_step.values()}) > 1


def test_an_uneven_epoch_ends_and_uses_every_row_once(two_ranks):
    _, job, runs = two_ranks
    lines = runs["uneven"].lines("draws.jsonl")
    epochs = [[line["pair_id"] for line in lines if (line["step"] > 4) == later] for later in (False, True)]
    assert [sorted(ids) for ids in epochs] == [list(range(7))] * 2
    assert epochs[0] != epochs[1]
    # Saved at the end of each epoch.
    assert {path.name for path in runs["uneven"].folder.glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-8"}
    assert "8 optimizer steps of 2 pairs" in output_of(job, 0, "uneven")
    # The last step of an epoch has one pair, and divides by one.
    assert [len(runs["uneven"].steps), runs["uneven"].steps[-1]["step"]] == [8, 8]


def test_a_log_file_is_short_has_no_carriage_returns_and_is_written_by_one_rank(two_ranks):
    _, job, runs = two_ranks
    assert len(runs["long"].steps) == 200
    first, second = (output_of(job, rank, "long") for rank in range(2))
    assert "\r" not in job.outputs[0] + job.outputs[1]
    assert len(first) < 200_000
    progress = [line for line in first.splitlines() if "training: " in line]
    assert len(progress) == 11
    assert "training: 200 of 200 steps" in progress[-1]
    assert "training" not in second
    assert len(second.splitlines()) <= 3


def test_no_trace_is_given_up_with_a_second_model_and_changing_draws(two_ranks):
    _, job, runs = two_ranks
    assert len(runs["two models"].steps) == 50
    assert all("nvalidate trace" not in output_of(job, rank, "two models") for rank in range(2))
    # Where the policy scores itself first, the trace of that pass is given up once: its lines would be seen.
    assert output_of(job, 0, "uneven").count("Invalidate trace") == 1


def test_the_export_loads_whole_and_holds_one_shard_and_one_tensor_at_most(two_ranks):
    from transformers import AutoModelForCausalLM

    results, job, runs = two_ranks
    lm, report = AutoModelForCausalLM.from_pretrained(runs["exact"].folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert all(p.numel() and np.isfinite(p.detach().numpy()).all() for p in lm.parameters())
    assert len(list((job.folder / "shards").glob("*.safetensors"))) > 5
    (held, largest), (held_elsewhere, _) = results
    assert largest < held <= SHARD_BYTES + largest
    assert held_elsewhere <= largest
