"""The training script as a user starts it: three launchers, one result; files of the contract; no compiler."""

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ds_stochdpo import StochDPOConfig, load_pairs
from tests.oracle import branch_logps, padded_dpo_loss, relative_error
from tests.tiny import pair_rows, tiny_llama, tiny_tokenizer, write_pairs, write_rows

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "launch" / "train.py")
BIN = Path(sys.executable).parent


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def commands(ranks=1):
    return {
        "python": [sys.executable, SCRIPT],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks),
                     "--master_port", free_port(), SCRIPT],
        "deepspeed": [str(BIN / "deepspeed"), "--num_accelerators", str(ranks), "--master_port", free_port(), SCRIPT],
    }  # fmt: skip


def launch(command, folder, **settings):
    """Run the script; returns its finished process. Ninja and compilers are out of reach."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    extensions = folder / "extensions"
    extensions.mkdir(parents=True, exist_ok=True)
    environment |= {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCH_EXTENSIONS_DIR": str(extensions),
        "PYTHONPATH": str(ROOT),
        "CXX": "no-compiler-here",
    }
    flags = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    done = subprocess.run([*command, *flags], env=environment, cwd=folder, capture_output=True, text=True, timeout=200)
    assert not any(extensions.iterdir()), "something was compiled"
    return done


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    tokenizer = tiny_tokenizer()
    tiny_llama(len(tokenizer)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_rows(folder / "pairs.jsonl", [{**row, "id": i} for i, row in enumerate(pair_rows(10))])
    zero3 = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}, "gradient_clipping": "auto"}
    (folder / "zero3.json").write_text(json.dumps(zero3))
    return folder


SETTINGS = {
    "model_name_or_path": "model",
    "dataset_name": "pairs.jsonl",
    "dataset_test_split": "pairs.jsonl",
    "reference_cache_dir": "cache",
    "deepspeed": "zero3.json",
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-3,
    "branch": "single",
    "position_keep": 0.5,
    "prefix_keep": 0.75,
    "log_draws": "true",
}


@pytest.fixture(scope="module")
def outcomes(job):
    done = {}
    for name, command in commands().items():
        shutil.rmtree(job / "cache", ignore_errors=True)
        done[name] = launch(command, job, output_dir=name, **SETTINGS)
    return done


def metrics_of(job, name):
    def refuse(constant):
        raise AssertionError(f"{constant} is not strict JSON")

    lines = (job / name / "metrics.jsonl").read_text().splitlines()
    parsed = [json.loads(line, parse_constant=refuse) for line in lines]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in parsed]


@pytest.mark.multiproc
def test_three_launchers_give_one_result(job, outcomes):
    for name, done in outcomes.items():
        assert done.returncode == 0, f"{name}: {done.stderr[-3000:]}"
    weights = {name: load_file(job / name / "model.safetensors") for name in outcomes}
    for name in ("torchrun", "deepspeed"):
        assert metrics_of(job, name) == metrics_of(job, "python")
        for key, value in weights["python"].items():
            assert torch.equal(weights[name][key], value), (name, key)


@pytest.mark.multiproc
def test_files_of_the_contract(job, outcomes):
    assert outcomes["python"].returncode == 0
    folder = job / "python"
    lines = metrics_of(job, "python")
    train = [line for line in lines if "loss" in line]
    evaluations = [line for line in lines if "eval_loss" in line]
    # 10 pairs in windows of 4, 4 and 2; an evaluation before and after.
    assert [line["step"] for line in train] == [1, 2, 3]
    assert [line["step"] for line in evaluations] == [0, 3]
    assert train[0]["loss"] == pytest.approx(0.693147, abs=1e-6)
    assert train[0]["rewards/margins"] == pytest.approx(0.0, abs=1e-6)
    assert evaluations[0]["eval_rewards/margins"] == pytest.approx(0.0, abs=1e-6)
    assert evaluations[1]["eval_rewards/margins"] > 0.01
    for key in ("epoch", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "logps/chosen", "logps/rejected",
                "grad_norm", "learning_rate", "tokens/executed", "tokens/scored", "tokens/backward"):  # fmt: skip
        assert key in train[0]
    assert train[0]["learning_rate"] == pytest.approx(1e-3)
    assert train[0]["tokens/backward"] < train[0]["tokens/executed"] < train[0]["tokens/full"]
    run = json.loads((folder / "run.json").read_text())
    assert run["finished"] is True
    assert run["settings"]["learning_rate"] == 1e-3
    assert run["data"]["train"]["counts"]["used"] == 10
    draws = [json.loads(line) for line in (folder / "draws.jsonl").read_text().splitlines()]
    assert sorted(d["pair_id"] for d in draws) == list(range(10))
    assert sum(d["kept"] == "chosen" for d in draws if d["step"] == 1) == 2
    assert (folder / "report.html").exists()
    assert (folder / "report.png").exists()


@pytest.mark.multiproc
def test_the_export_generates_in_plain_transformers(job, outcomes):
    assert outcomes["python"].returncode == 0
    lm = AutoModelForCausalLM.from_pretrained(job / "python")
    tokenizer = AutoTokenizer.from_pretrained(job / "python")
    before = AutoModelForCausalLM.from_pretrained(job / "model").state_dict()
    assert lm.state_dict().keys() == before.keys()
    assert any(not torch.equal(v, before[k]) for k, v in lm.state_dict().items())
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Name number 3."}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    made = lm.generate(**prompt, max_new_tokens=5, do_sample=False)
    assert made.shape[1] > prompt["input_ids"].shape[1]


@pytest.mark.multiproc
def test_a_second_run_refuses_the_folder_and_reuses_the_reference(job, outcomes):
    assert outcomes["python"].returncode == 0
    python = commands()["python"]
    before = (job / "python" / "metrics.jsonl").read_bytes()
    refused = launch(python, job, output_dir="python", **SETTINGS)
    assert refused.returncode == 2
    assert "overwrite_output_dir" in refused.stderr.splitlines()[-1]
    assert (job / "python" / "metrics.jsonl").read_bytes() == before
    again = launch(python, job, output_dir="other", **{**SETTINGS, "learning_rate": 1e-4, "beta": 0.3})
    assert again.returncode == 0, again.stderr[-2000:]
    assert "reference log-probs: read from" in again.stderr
    assert "\r" not in again.stderr


@pytest.mark.multiproc
def test_two_ranks_give_the_result_of_one(job, outcomes):
    assert outcomes["python"].returncode == 0
    settings = {**SETTINGS, "per_device_train_batch_size": 2}
    done = launch(commands(ranks=2)["deepspeed"], job, output_dir="two", **settings)
    assert done.returncode == 0, done.stderr[-3000:]
    # Of the two sets; both ranks read both.
    assert done.stderr.count("columns not used: id") == 2
    for one, two in zip(metrics_of(job, "python"), metrics_of(job, "two"), strict=True):
        assert two == pytest.approx(one, rel=2e-5, abs=2e-6)
    one, two = (load_file(job / name / "model.safetensors") for name in ("python", "two"))
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=1e-4, atol=2e-6)


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dataset_name": "missing.jsonl"}, "missing.jsonl"),
        ({"prefix_keep": 0.1}, "prefix_keep"),
        ({"model_name_or_path": "nowhere"}, "model_name_or_path"),
        ({"attn_implementation": "flash_attn"}, "flash_attn"),
        ({"betta": 1}, "did you mean beta?"),
    ],
)
def test_mistakes_end_with_a_sentence(job, settings, words):
    done = launch(commands()["python"], job, output_dir="mistake", **{**SETTINGS, **settings})
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert words in done.stderr.splitlines()[-1]
    assert not (job / "mistake" / "metrics.jsonl").exists()


@pytest.mark.multiproc
@pytest.mark.parametrize("stage", [0, 3])
def test_one_sgd_step_of_the_script_is_the_gradient_of_padded_dpo(job, stage):
    """Learning rate 1 and no clipping: exported weights before minus after are the gradient."""
    sgd = {
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    (job / f"sgd{stage}.json").write_text(json.dumps(sgd))
    write_pairs(job / "one.jsonl", 1)
    done = launch(
        commands()["python"], job, model_name_or_path="model", dataset_name="one.jsonl", output_dir=f"sgd{stage}",
        reference_cache_dir="cache", deepspeed=f"sgd{stage}.json", branch="both",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    config = StochDPOConfig(dataset_name=str(job / "one.jsonl"))
    pairs = load_pairs(config, AutoTokenizer.from_pretrained(job / "model"), context_length=256).pairs
    lm = AutoModelForCausalLM.from_pretrained(job / "model").eval()
    with torch.no_grad():
        ref = {side: branch_logps(lm, pairs[0].prompt_ids, getattr(pairs[0], f"{side}_ids")).numpy()
               for side in ("chosen", "rejected")}  # fmt: skip
    pair = dataclasses.replace(pairs[0], chosen_ref_logps=ref["chosen"], rejected_ref_logps=ref["rejected"])
    padded_dpo_loss(lm, [pair], beta=0.1).backward()
    before = load_file(job / "model" / "model.safetensors")
    after = load_file(job / f"sgd{stage}" / "model.safetensors")
    gradient = {name: before[name] - after[name] for name in before}
    assert relative_error(gradient, {n: p.grad for n, p in lm.named_parameters()}) < 1e-5


@pytest.mark.multiproc
def test_the_python_example_of_the_readme_runs(job):
    example = (ROOT / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    script = example.replace("path/to/model", "model").replace("ds_configs/", str(ROOT / "ds_configs") + "/")
    (job / "example.py").write_text(script, encoding="utf-8")
    done = launch([sys.executable, "example.py"], job)
    assert done.returncode == 0, done.stderr[-2000:]
    trained, start = (load_file(job / name / "model.safetensors") for name in ("aligned", "model"))
    assert any(not torch.equal(trained[key], value) for key, value in start.items())
