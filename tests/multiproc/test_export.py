"""Export from 2 ranks in several files, loaded by plain transformers; bf16 training with fp32 master weights."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.multiproc import cases, harness
from tests.oracle import branch_logps

pytestmark = pytest.mark.multiproc

SHARD_BYTES = 20_000
BF16_LR = 5e-7


@dataclasses.dataclass(frozen=True)
class Run:
    """Two optimizer steps from a model on disk, then an export."""

    stage: int
    tie: bool
    bf16: bool
    kind: str = "llama"


RUNS = {
    "z3-untied-fp32": Run(3, False, False),
    "z3-tied-fp32": Run(3, True, False),
    "z3-untied-bf16": Run(3, False, True),
    "z3-tied-bf16": Run(3, True, True),
    "z1-untied-bf16": Run(1, False, True),
    # On disk each expert has tensors of its own; loaded, they are stacked.
    "z3-mixtral-fp32": Run(3, False, False, kind="mixtral"),
    "z3-gemma2-bf16": Run(3, True, True, kind="gemma2"),
}


def train_and_export(sources, folder):
    """Worker: load, train two steps, export twice; rank 0 writes the master weights before and after."""
    import deepspeed
    from safetensors.torch import save_file

    import ds_stochdpo
    from ds_stochdpo.engine import load_policy, process_group, resolve_settings
    from ds_stochdpo.engine.export import export_model

    done = {}
    with process_group() as ranks:
        for name, run in RUNS.items():
            config = ds_stochdpo.StochDPOConfig(
                **cases.PRUNED, beta=cases.BETA, per_device_train_batch_size=2, bf16=run.bf16
            )
            adamw = {"type": "AdamW", "params": {"lr": BF16_LR, "torch_adam": True}}
            source = cases.deepspeed_json(run.stage, adamw if run.bf16 else cases.SGD)
            _, ds = resolve_settings(config, source, world_size=ranks.world_size)
            lm = load_policy(sources[run.kind, run.tie], ds, bf16=run.bf16)
            arrived = [(hasattr(p, "ds_id"), p.numel()) for p in lm.parameters()]
            engine = ds_stochdpo.initialize(model=lm, config=config, deepspeed=source)

            def masters(lm=lm):
                # Every rank: gathering a master weight is a collective. It takes another way than the export.
                return {n: deepspeed.utils.safe_get_full_fp32_param(p).clone() for n, p in lm.named_parameters()}

            before = masters()
            metrics = []
            for pairs in cases.step_pairs(steps=2):
                metrics.append(engine.train_step(cases.shares(pairs, 4)[ranks.rank]))
            after = masters()
            if ranks.is_main:
                save_file(before, folder / f"{name}-before.safetensors")
                save_file(after, folder / f"{name}-after.safetensors")
            # First in one file: an export over an older one must leave nothing of it.
            export_model(lm, folder / name, ranks)
            # Rank 0 deletes the old files in the next export, so only it can still look at them.
            is_one_file = ranks.is_main and (folder / name / "model.safetensors").exists()
            export_model(lm, folder / name, ranks, max_shard_size=SHARD_BYTES)
            scores = engine.score(cases.step_pairs(steps=1)[0][:2])
            done[name] = {
                "metrics": metrics,
                "arrived": arrived,
                "one_file": is_one_file,
                "scores": [(s.chosen_logps, s.rejected_logps) for s in scores],
            }
    return done


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    sources = {}
    for kind, tie in {(run.kind, run.tie) for run in RUNS.values()}:
        sources[kind, tie] = str(tmp_path_factory.mktemp("source"))
        cases.model(kind, tie=tie).save_pretrained(sources[kind, tie])
    return harness.run(train_and_export, 2, tmp_path_factory.mktemp("export"), sources)


@pytest.mark.parametrize("name", RUNS)
def test_files_load_in_plain_transformers_with_the_trained_values(exported, name):
    from transformers import AutoModelForCausalLM

    _, job = exported
    run, folder = RUNS[name], job.folder / name
    dtype = torch.bfloat16 if run.bf16 else torch.float32
    after = load_file(job.folder / f"{name}-after.safetensors")
    lm, report = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    modes = {path.stat().st_mode for path in folder.iterdir() if path.is_file()}
    assert len(modes) == 1, "weights are as readable as the rest"
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert lm.dtype == dtype
    assert lm.config.tie_word_embeddings == run.tie
    assert (lm.lm_head.weight is lm.model.embed_tokens.weight) == run.tie
    loaded = dict(lm.named_parameters())
    assert loaded.keys() == after.keys()
    for key, value in loaded.items():
        assert value.dtype == dtype
        assert torch.equal(value, after[key].to(dtype)), key


@pytest.mark.parametrize("name", RUNS)
def test_weights_are_cut_into_indexed_files(exported, name):
    results, job = exported
    folder = job.folder / name
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    assert {f.name for f in files} == set(index["weight_map"].values())
    assert results[0][name]["one_file"]
    stored = {key: value for file in files for key, value in load_file(file).items()}
    assert stored.keys() == index["weight_map"].keys()
    assert {v.dtype for v in stored.values()} == {torch.bfloat16 if RUNS[name].bf16 else torch.float32}
    assert ("lm_head.weight" in stored) == (not RUNS[name].tie)
    assert index["metadata"]["total_size"] == sum(v.numel() * v.element_size() for v in stored.values())
    for file in files:
        assert sum(v.numel() * v.element_size() for v in load_file(file).values()) <= SHARD_BYTES


@pytest.mark.parametrize("name", RUNS)
def test_loaded_model_scores_like_the_engine(exported, name):
    from transformers import AutoModelForCausalLM

    results, job = exported
    lm = AutoModelForCausalLM.from_pretrained(job.folder / name, dtype="auto").eval()
    # bf16 activations have 8 bits; the packed lane rounds in another order.
    tolerance = 0.1 if RUNS[name].bf16 else 1e-5
    pairs = cases.step_pairs(steps=1)[0][:2]
    worst = 0.0
    for rank in results:
        for pair, scores in zip(pairs, rank[name]["scores"], strict=True):
            for response, got in zip((pair.chosen_ids, pair.rejected_ids), scores, strict=True):
                with torch.no_grad():
                    want = branch_logps(lm, pair.prompt_ids, response).numpy()
                worst = max(worst, float(np.abs(got - want).max()))
    print(name, "largest difference in nats:", worst)
    assert worst < tolerance


@pytest.mark.parametrize("name", [n for n, r in RUNS.items() if r.stage == 3])
def test_a_policy_arrives_partitioned(exported, name):
    for rank in exported[0]:
        assert rank[name]["arrived"]
        assert all(is_partitioned and held == 0 for is_partitioned, held in rank[name]["arrived"])


@pytest.mark.parametrize("name", RUNS)
def test_training_is_finite_and_equal_on_all_ranks(exported, name):
    (first, second), _ = exported
    assert first[name]["metrics"] == second[name]["metrics"]
    assert len(first[name]["metrics"]) == 2
    assert all(np.isfinite(v) for m in first[name]["metrics"] for v in m.values())


@pytest.mark.parametrize("name", [n for n, r in RUNS.items() if r.bf16])
def test_master_weights_move_where_bf16_alone_would_stand_still(exported, name):
    _, job = exported
    before, after = (load_file(job.folder / f"{name}-{when}.safetensors") for when in ("before", "after"))
    moved = stood = total = 0
    # Gemma2's norms start at 0, where bf16 is as fine as fp32.
    for key in (k for k in before if "proj" in k):
        assert before[key].dtype == torch.float32
        # Adam moves a weight by about lr a step, whatever the size of its gradient.
        assert float((after[key] - before[key]).abs().max()) <= 2.5 * BF16_LR + 1e-7, key
        moved += int((after[key] != before[key]).sum())
        stood += int((after[key].bfloat16() == before[key].bfloat16()).sum())
        total += before[key].numel()
    print(name, f"masters moved {moved / total:.4f}, bf16 unchanged {stood / total:.4f}")
    assert moved > 0.9 * total
    assert stood > 0.99 * total


def export_while_gathers_are_under_way(_, folder):
    """Worker: an evaluation ends with prefetched gathers for a backward pass that never comes; then export."""
    import ds_stochdpo
    from ds_stochdpo.engine import process_group
    from tests.tiny import tiny_llama

    # DeepSpeed prefetches only where many parameters may live and few are reused.
    prefetching = {
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            "stage3_param_persistence_threshold": 40,
            "stage3_prefetch_bucket_size": 10_500,
            "stage3_max_live_parameters": 400_000,
            "stage3_max_reuse_distance": 40_000,
        }
    }
    with process_group() as ranks:
        lm = tiny_llama(2300, num_hidden_layers=6, tie=True)
        config = ds_stochdpo.StochDPOConfig(beta=cases.BETA, per_device_train_batch_size=4)
        engine = ds_stochdpo.initialize(model=lm, config=config, deepspeed=prefetching)
        pairs = cases.shares(cases.step_pairs(steps=1)[0], 4)[ranks.rank]
        for _ in range(3):
            engine.train_step(pairs)
            engine.evaluate(pairs)
        states = {str(p.ds_status) for p in lm.parameters()}
        engine.export(folder / "model")
        engine.train_step(pairs)
    return states


def test_export_waits_for_gathers_that_are_under_way(tmp_path):
    from transformers import AutoModelForCausalLM

    results, job = harness.run(export_while_gathers_are_under_way, 2, tmp_path, None)
    # Otherwise this test would show nothing.
    assert all("ZeroParamStatus.INFLIGHT" in states for states in results)
    assert AutoModelForCausalLM.from_pretrained(job.folder / "model").config.num_hidden_layers == 6
