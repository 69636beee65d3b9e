"""TRL 1.16's DPOTrainer and this package on the same weights, rows and settings give the same numbers.

The numbers in trl_1_16.json come from record_trl.py, which runs TRL alone. Where TRL is installed (in this
interpreter, or in the one that TRL_PYTHON names) it is also run anew.
"""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import ds_stochdpo
from tests.oracle import branch_logps
from tests.parity.cases import CASES, CONTEXT, METRICS, POLICY_SEED, build_model, checksum, token_line
from tests.tiny import write_rows

pytestmark = pytest.mark.usefixtures("single_process")
FOLDER = Path(__file__).parent
RECORDED = json.loads((FOLDER / "trl_1_16.json").read_text(encoding="ascii"))
TOLERANCE = 1e-4
"""Largest absolute difference of any metric in any of the three steps; 1.3e-5 when it was recorded."""
each_case = pytest.mark.parametrize("name", CASES)


def load_case(case, folder):
    rows = write_rows(folder / "rows.jsonl", case.dataset)
    config = ds_stochdpo.StochDPOConfig(
        dataset_name=str(rows),
        loss_type=case.loss_type,
        beta=case.beta,
        label_smoothing=case.label_smoothing,
        learning_rate=case.learning_rate,
        max_grad_norm=0.0,
        per_device_train_batch_size=case.batch_size,
        gradient_accumulation_steps=case.accumulation,
    )
    pairs = ds_stochdpo.load_pairs(config, case.tokenizer, context_length=CONTEXT, progress=False).pairs
    return config, pairs


def with_reference(pairs, lm):
    """Log-probs by the model's own forward of each response alone, so not by the package."""

    def scored(pair, response):
        with torch.no_grad():
            return branch_logps(lm, pair.prompt_ids, response).numpy()

    return [
        dataclasses.replace(
            pair,
            chosen_ref_logps=scored(pair, pair.chosen_ids),
            rejected_ref_logps=scored(pair, pair.rejected_ids),
        )
        for pair in pairs
    ]


def deepspeed_settings(case, stage):
    settings = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    if case.optimizer == "sgd":
        settings["optimizer"] = {"type": "SGD", "params": {"lr": case.learning_rate}}
    return settings


def run_ours(case, folder, *, stage=0, change=lambda pairs: pairs):
    """What record_trl.py records, from this package; `change` alters the pairs before anything sees them."""
    config, pairs = load_case(case, folder)
    lm = build_model(POLICY_SEED)
    reference = lm if case.reference_seed is None else build_model(case.reference_seed)
    weights = {"policy": checksum(lm), "reference": checksum(reference)}
    token_ids = [token_line(p.prompt_ids, p.chosen_ids, p.rejected_ids) for p in pairs]
    pairs = change(pairs)
    engine = ds_stochdpo.initialize(model=lm, config=config, deepspeed=deepspeed_settings(case, stage))
    if case.reference_seed is None:
        pairs = ds_stochdpo.add_reference(engine, pairs)
    else:
        pairs = with_reference(pairs, reference)
    steps, num_tokens = [], 0.0
    for step in range(case.steps):
        start = step * case.pairs_per_step
        metrics = engine.train_step([pairs[i % len(pairs)] for i in range(start, start + case.pairs_per_step)])
        num_tokens += metrics["tokens/full"]
        steps.append({key: metrics[key] for key in METRICS} | {"num_tokens": num_tokens})
    return {"weights": weights, "token_ids": token_ids, "steps": steps}


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """Our record of each case, made once."""
    return {name: run_ours(case, tmp_path_factory.mktemp(name)) for name, case in CASES.items()}


def difference(ours, theirs):
    """Largest absolute difference of one step, over all metrics."""
    keys = set(theirs)
    if abs(theirs["rewards/margins"]) < 1e-6:
        # The policy still is the reference: each margin is rounding noise, and so is its sign.
        keys.remove("rewards/accuracies")
    return max(abs(ours[key] - theirs[key]) for key in keys)


def assert_same(ours, theirs):
    assert ours["weights"] == theirs["weights"]
    assert ours["token_ids"] == theirs["token_ids"]
    assert len(ours["steps"]) == len(theirs["steps"])
    for a, b in zip(ours["steps"], theirs["steps"], strict=True):
        assert difference(a, b) < TOLERANCE, (a, b)


def test_the_record_is_of_trl_1_16_and_of_these_cases():
    assert RECORDED["versions"]["trl"].startswith("1.16.")
    settings = {name: record["settings"] for name, record in RECORDED["cases"].items()}
    assert settings == {name: dataclasses.asdict(case) for name, case in CASES.items()}


def test_the_record_is_not_degenerate():
    """Zero rewards would agree whatever beta, reference and sign are."""
    for record in RECORDED["cases"].values():
        assert all(abs(step["rewards/margins"]) > 0.01 for step in record["steps"][1:])


@each_case
def test_we_report_what_trl_reported(ours, name):
    assert_same(ours[name], RECORDED["cases"][name])


def test_zero_3_reports_it_too(tmp_path):
    assert_same(run_ours(CASES["sigmoid"], tmp_path, stage=3), RECORDED["cases"]["sigmoid"])


def boundary_one_token_early(pair):
    prompt, last = pair.prompt_ids[:-1], pair.prompt_ids[-1:]
    chosen, rejected = (np.concatenate([last, ids]) for ids in (pair.chosen_ids, pair.rejected_ids))
    return dataclasses.replace(pair, prompt_ids=prompt, chosen_ids=chosen, rejected_ids=rejected)


def end_token_left_out(pair):
    return dataclasses.replace(pair, chosen_ids=pair.chosen_ids[:-1], rejected_ids=pair.rejected_ids[:-1])


@pytest.mark.parametrize(
    ("settings", "change"),
    [
        ({"beta": 0.2}, lambda pair: pair),
        ({"loss_type": "robust", "label_smoothing": 0.1}, lambda pair: pair),
        ({"reference_seed": 13}, lambda pair: pair),
        ({}, boundary_one_token_early),
        ({}, end_token_left_out),
    ],
    ids=["beta", "loss", "reference", "boundary", "end_token"],
)
def test_a_wrong_run_is_noticed(tmp_path, settings, change):
    case = dataclasses.replace(CASES["sigmoid_chat"], steps=1, **settings)
    wrong = run_ours(case, tmp_path, change=lambda pairs: [change(p) for p in pairs])
    assert difference(wrong["steps"][0], RECORDED["cases"]["sigmoid_chat"]["steps"][0]) > 100 * TOLERANCE


def python_with_trl():
    if "TRL_PYTHON" in os.environ:
        # Not looked into: a wrong path must fail, not skip.
        return os.environ["TRL_PYTHON"]
    return sys.executable if importlib.util.find_spec("trl") else None


def test_trl_run_now_reports_what_it_reported(ours, tmp_path):
    python = python_with_trl()
    if python is None:
        pytest.skip("TRL is not installed; name a Python that has it with TRL_PYTHON")
    # The process group of this test is none of TRL's business.
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {key: value for key, value in os.environ.items() if key not in ranks}
    env |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "OMP_NUM_THREADS": "1"}
    out = tmp_path / "live.json"
    run = subprocess.run(
        [python, str(FOLDER / "record_trl.py"), "--out", str(out)],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    live = json.loads(out.read_text(encoding="ascii"))["cases"]
    assert live.keys() == CASES.keys()
    for name in CASES:
        assert_same(live[name], RECORDED["cases"][name])
        assert_same(ours[name], live[name])
