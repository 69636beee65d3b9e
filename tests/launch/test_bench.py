"""The benchmark: what it compares computes the same numbers, its record keeps its schema, and its ratios are right."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import torch

from ds_stochdpo import StochDPOConfig
from tests.oracle import padded_dpo_loss
from tests.tiny import tiny_llama, tiny_tokenizer, write_pairs

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "launch"))

from benchmarking.timing import ratio  # noqa: E402
from benchmarking.variants import BASES, Bench, variant_of  # noqa: E402
from benchmarking.workload import build_model, load_workload  # noqa: E402

RECORD = ("stock", "exact", "all", "smaller", "single_prefix+budget")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    tokenizer = tiny_tokenizer()
    tiny_llama(len(tokenizer)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_pairs(folder / "pairs.jsonl", 6)
    settings = {"model_name_or_path": str(folder / "model"), "dataset_name": str(folder / "pairs.jsonl")}
    return folder, StochDPOConfig(**settings, position_keep=0.5, prefix_keep=0.5, branch="single")


def gradients(config, name, workload):
    bench = Bench(config, 2)
    variant = variant_of(name, config, len(workload.pairs))
    taken = {}
    # The step clears the gradients at its end; the optimizer is the last to see them.
    optimizer = bench._optimizers[variant.form]
    module = bench._modules[variant.form]
    optimizer.step = lambda: taken.update(
        {n.removeprefix("lm."): p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    )
    bench.step(variant, workload.pairs, turn=3)
    return taken


@pytest.mark.parametrize("name", ["stock", "chunked", "packed", "exact", "stock+ckpt", "exact+ckpt", "exact+online"])
def test_what_is_exact_has_the_gradient_of_padded_dpo(job, name):
    _, config = job
    workload = load_workload(config.dataset_name, config, 6)
    model = build_model(config, 2, torch.device("cpu"))
    padded_dpo_loss(model, workload.pairs, beta=config.beta).backward()
    own = gradients(config, name, workload)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(own[key], parameter.grad, rtol=1e-4, atol=1e-6)


def test_a_token_budget_changes_no_gradient(job):
    _, config = job
    workload = load_workload(config.dataset_name, config, 6)
    bench = Bench(config, 2, ("lanes",))
    variant = variant_of("single_prefix", config, 6)
    taken = []
    bench._optimizers["lanes"].step = lambda: taken.append(
        torch.cat([p.grad.flatten() for p in bench._modules["lanes"].parameters()])
    )
    for max_tokens in (None, 90):
        bench.step(type(variant)(variant.name, variant.work, 6, max_tokens), workload.pairs, turn=1)
    torch.testing.assert_close(taken[0], taken[1], rtol=1e-4, atol=1e-7)


def test_every_name_prunes_what_it_says(job):
    _, config = job
    pruned = {
        name: (plan.branch == "single", plan.prefix_keep < 1, plan.position_keep < 1)
        for name in BASES
        for plan in [variant_of(name, config, 6).work.plan]
    }
    off = dict.fromkeys(("stock", "chunked", "packed", "exact", "smaller"), (False, False, False))
    single = dict.fromkeys(("packed_single", "single"), (True, False, False))
    rest = {"prefix": (False, True, False), "position": (False, False, True), "single_prefix": (True, True, False)}
    assert pruned == {**off, **single, **rest, "all": (True, True, True)}


def test_ratio_of_rounds():
    found = ratio([[4.0], [6.0], [8.0]], [[1.0, 3.0], [1.0, 1.0], [2.0, 2.0]])
    assert (found.median, found.low, found.high) == (4.0, 2.0, 6.0)
    assert found.mean == pytest.approx(6.0 / (5 / 3))


def test_record_keeps_its_schema(job):
    folder, config = job
    flags = {"model_name_or_path": config.model_name_or_path, "dataset_name": config.dataset_name,
             "output_dir": str(folder / "out"), "position_keep": 0.5, "prefix_keep": 0.5,
             "branch": "single"}  # fmt: skip
    command = [sys.executable, str(ROOT / "launch" / "bench.py")]
    command += [part for key, value in flags.items() for part in (f"--{key}", str(value))]
    command += ["--batch_size", "6", "--rounds", "2", "--draws", "2", "--layers", "2"]
    command += ["--sections", "head", "--workloads", "synthetic:9x7", "--variants", *RECORD]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads((folder / "out" / "bench.json").read_text())
    schema = json.loads((ROOT / "launch" / "benchmarking" / "record.schema.json").read_text())
    jsonschema.validate(record, schema)
    made_up = record["workloads"][0]
    assert made_up["workload"]["lengths"] == [[9, 7, 7]] * 6
    rows = {row["name"]: row for row in made_up["variants"]}
    assert list(rows) == list(RECORD)
    # Full logits are counted by torch and predicted by the cost model alike.
    assert rows["stock"]["memory"]["flops"][0] == pytest.approx(rows["stock"]["work"]["total"], rel=0.02)
    assert rows["exact"]["memory"]["flops"][0] == pytest.approx(rows["exact"]["work"]["total"], rel=0.02)
    executed = [rows[name]["work"]["tokens_executed"] for name in ("exact", "stock")]
    assert executed == [6 * 21, 6 * 32]
    assert rows["smaller"]["pairs"] < 6
    assert [len(rows[name]["seconds"][0]) for name in ("stock", "all")] == [1, 2]
    for name in ("bench.png", "bench.html"):
        assert (folder / "out" / name).stat().st_size > 10_000
    assert "stock DPO" in done.stdout
