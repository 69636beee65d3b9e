"""Rows that do not divide among ranks, micro-batches, epochs: each is used once an epoch; padding weighs nothing."""

import contextlib
import json
import logging

import pytest
import torch
from safetensors.torch import load_file

from tests.multiproc import cases, harness
from tests.tiny import tiny_llama, tiny_tokenizer, write_pairs

pytestmark = pytest.mark.multiproc

# rows, pairs of a micro-step over all ranks, micro-steps, epochs -> optimizer steps of each epoch
SCENARIOS = {
    "7 rows on 2 ranks": (7, 2, 1, 2.0, [4, 4]),
    "1 row on 2 ranks": (1, 2, 1, 2.0, [1, 1]),
    "3 rows on 2 ranks of 2 pairs and 4 micro-steps": (3, 4, 4, 1.0, [1]),
    "5 rows, one and a half epochs": (5, 2, 1, 1.5, [3, 2]),
}
BLOWN_UP = {"learning_rate": 1e30, "max_steps": 20, "save_steps": 1}


def train(folder, name, num_rows, pairs_of_micro_step, micro_steps, epochs, **settings):
    """The training script's own function, inside a process group that outlives it."""
    from ds_stochdpo import StochDPOConfig
    from ds_stochdpo.engine import Ranks
    from ds_stochdpo.train import run

    run.process_group = lambda *_: contextlib.nullcontext(Ranks())
    values = {
        "model_name_or_path": str(folder / "model"),
        "dataset_name": str(folder / f"{num_rows}.jsonl"),
        "output_dir": str(folder / name),
        "deepspeed": str(folder / "zero3.json"),
        "reference": "none",
        "per_device_train_batch_size": pairs_of_micro_step // Ranks().world_size,
        "gradient_accumulation_steps": micro_steps,
        "num_train_epochs": epochs,
        "learning_rate": 0.03,
        "log_draws": True,
        **cases.PRUNED,
        **settings,
    }
    run.run_training(StochDPOConfig(**values))


def train_all(args, folder):
    """Worker: every scenario, with a checkpoint at the end of each epoch; then one whose numbers blow up."""
    from ds_stochdpo import NonFiniteError
    from ds_stochdpo.engine import process_group

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with process_group() as ranks:
        inputs, world = args
        for name, (*sizes, steps) in SCENARIOS.items():
            train(inputs, f"{name}/{world}", *sizes, save_steps=steps[0])
        with pytest.raises(NonFiniteError) as stopped:
            train(inputs, f"blown up/{world}", 7, 2, 1, 1.0, **BLOWN_UP)
        ranks.barrier()
        return str(stopped.value)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uneven")
    tokenizer = tiny_tokenizer()
    tiny_llama(len(tokenizer), initializer_range=0.2).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for num_rows in {scenario[0] for scenario in SCENARIOS.values()}:
        write_pairs(folder / f"{num_rows}.jsonl", num_rows)
    (folder / "zero3.json").write_text(json.dumps(cases.deepspeed_json(3, {"type": "SGD", "params": {"lr": "auto"}})))
    return folder


@pytest.fixture(scope="module")
def jobs(inputs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")
    return {n: harness.run(train_all, n, folder / str(n), (inputs, n), limit_s=280) for n in (1, 2)}


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_row_once_an_epoch_and_padding_without_weight(inputs, jobs, name):
    num_rows, pairs_of_micro_step, micro_steps, epochs, steps = SCENARIOS[name]
    folder = inputs / name
    draws = lines(folder / "2" / "draws.jsonl")
    last_of_epoch = [sum(steps[: e + 1]) for e in range(len(steps))]
    for epoch, last in enumerate(last_of_epoch):
        ids = [d["pair_id"] for d in draws if last - steps[epoch] < d["step"] <= last]
        assert len(set(ids)) == len(ids)
        if epoch + 1 <= epochs:
            assert sorted(ids) == list(range(num_rows))
    pairs_of_step = pairs_of_micro_step * micro_steps
    rest = f" (the last of a pass has {num_rows % pairs_of_step})"
    said = f"{num_rows} pairs, {sum(steps)} optimizer steps of {pairs_of_step} pairs{rest}, 2 rank(s)"
    assert said in jobs[2][1].outputs[0]
    assert [line["step"] for line in lines(folder / "2" / "metrics.jsonl")] == list(range(1, sum(steps) + 1))
    saved = {path.name for path in (folder / "2").glob("checkpoint-*")}
    assert {f"checkpoint-{last}" for last in last_of_epoch} <= saved
    # One rank packs the same pairs with other padding, or none.
    one, two = (load_file(folder / str(n) / "model.safetensors") for n in (1, 2))
    start = load_file(inputs / "model" / "model.safetensors")
    moved = max((one[key] - start[key]).abs().max() for key in start)
    for key in start:
        torch.testing.assert_close(two[key], one[key], rtol=0, atol=1e-5 * float(moved))


def test_numbers_that_blow_up_stop_every_rank_and_keep_the_checkpoints(inputs, jobs):
    messages = jobs[2][0]
    assert messages[0] == messages[1]
    assert "is not finite" in messages[0]
    assert "pairs for which it is not finite: " in messages[0]
    folder = inputs / "blown up" / "2"
    run = json.loads((folder / "run.json").read_text())
    assert run["stopped"] == messages[0]
    assert run["exit_code"] == 3
    assert not run["finished"]
    from ds_stochdpo.train.checkpoints import newest_complete

    newest = int(newest_complete(folder).name.removeprefix("checkpoint-"))
    assert f"optimizer step {newest + 1}: " in messages[0]
