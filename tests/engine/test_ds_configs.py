"""Every file of ds_configs trains: a few steps of a tiny model in fp32 and, where its stage has it, in bf16."""

import json
from pathlib import Path

import pytest

import ds_stochdpo
from tests.oracle import random_pairs
from tests.tiny import tiny_llama

FILES = sorted((Path(__file__).parents[2] / "ds_configs").glob("*.json"))


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_config_lowers_the_loss(single_process, path, bf16):
    lm = tiny_llama(97)
    config = ds_stochdpo.StochDPOConfig(
        reference="none", per_device_train_batch_size=4, bf16=bf16, learning_rate=1e-2, branch="single"
    )
    engine = ds_stochdpo.initialize(model=lm.bfloat16() if bf16 else lm, config=config, deepspeed=path)
    pairs = random_pairs([(6, 9, 5), (4, 2, 7), (3, 3, 11), (2, 4, 6)], 97, seed=1)
    losses = [engine.train_step(pairs)["loss"] for _ in range(4)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_config_leaves_our_numbers_to_us_and_compiles_nothing(path):
    ds = json.loads(path.read_text())
    assert ds["optimizer"]["params"]["torch_adam"] is True
    assert {ds["train_micro_batch_size_per_gpu"], ds["gradient_clipping"], ds["bf16"]["enabled"],
            ds["optimizer"]["params"]["lr"]} == {"auto"}  # fmt: skip
