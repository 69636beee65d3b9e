"""What a run does without being asked: seeds, order, network."""

import socket
import sys

import huggingface_hub.constants

from tests.cases.job import PRUNED
from tests.tiny import pair_rows

PAIRS = pair_rows()


def order(run):
    return [line["pair_id"] for line in run.lines("draws.jsonl")]


def test_a_seed_decides_order_and_draws_and_a_run_repeats_bit_for_bit(jobs):
    settings = {"num_train_epochs": 2, "log_draws": True, "reference_model": "other llama", **PRUNED}
    first, again, other = (jobs.run("wide", PAIRS, seed=seed, **settings) for seed in (0, 0, 1))
    assert again.steps == first.steps
    assert (again.folder / "model.safetensors").read_bytes() == (first.folder / "model.safetensors").read_bytes()
    assert again.lines("draws.jsonl") == first.lines("draws.jsonl")
    epochs = order(first)[:24], order(first)[24:]
    assert [sorted(ids) for ids in epochs] == [list(range(24))] * 2
    assert epochs[0] != epochs[1]
    assert order(other)[:24] != epochs[0]
    assert other.steps != first.steps


def test_a_default_run_looks_nothing_up_and_imports_no_tracker(jobs, monkeypatch):
    """Although it may: the hub is not switched off here."""
    looked_up = []
    resolve = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **k: looked_up.append(host) or resolve(host, *a, **k))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    before = set(sys.modules)
    run = jobs.run("llama", PAIRS[:4])
    assert [line["step"] for line in run.steps] == [1]
    assert looked_up == []
    new = {name.split(".")[0] for name in set(sys.modules) - before}
    assert not new & {"tensorboard", "wandb", "comet_ml"}
