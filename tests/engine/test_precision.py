"""bf16 and autocast: as close to the fp32 gradient as plain torch is. Offload: the same steps as without."""

import copy

import deepspeed
import pytest
import torch
from safetensors.torch import load_file

import ds_stochdpo
from tests.engine.test_gradient import BETA, VOCAB, oracle_gradient, tiny_llama
from tests.multiproc import cases
from tests.oracle import padded_dpo_loss, random_pairs, relative_error
from tests.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("single_process")

LENGTHS = [(6, 9, 5), (2, 3, 8), (4, 1, 7), (5, 6, 6)]


def masters(engine):
    """Full fp32 weights, whatever the stage and precision."""
    named = engine.module.lm.named_parameters()
    return {n: deepspeed.utils.safe_get_full_fp32_param(p).detach().clone() for n, p in named}


def one_step_gradient(lm, pairs, ds, **settings):
    """SGD with lr 1 and no clipping: fp32 weights before minus after."""
    ds = {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "gradient_clipping": 0.0, **ds}
    config = ds_stochdpo.StochDPOConfig(beta=BETA, per_device_train_batch_size=2, **settings)
    engine = ds_stochdpo.initialize(model=copy.deepcopy(lm), config=config, deepspeed=ds)
    before = masters(engine)
    engine.train_step(pairs)
    after = masters(engine)
    return {n: before[n] - after[n] for n in before}


def zero(stage, **more):
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **more}}


def bf16_model():
    """A model whose fp32 weights are bf16 numbers, so that only the computation differs between precisions."""
    return tiny_llama().bfloat16().float()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("how", ["bf16", "autocast"])
def test_half_precision_is_as_close_to_fp32_as_plain_torch(stage, how):
    lm, pairs = bf16_model(), random_pairs(LENGTHS, VOCAB, refs=True)
    truth = oracle_gradient(lm, pairs)
    plain = copy.deepcopy(lm)
    if how == "bf16":
        plain = plain.bfloat16()
        padded_dpo_loss(plain, pairs, beta=BETA).backward()
    else:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = padded_dpo_loss(plain, pairs, beta=BETA)
        loss.backward()
    plain_error = relative_error({n: p.grad.float() for n, p in plain.named_parameters()}, truth)
    if how == "bf16":
        ours = one_step_gradient(lm, pairs, zero(stage), bf16=True)
    else:
        ours = one_step_gradient(lm, pairs, {**zero(stage), "torch_autocast": {"enabled": True, "dtype": "bfloat16"}})
    error = relative_error(ours, truth)
    # Both are half precision: an error of 0 would mean that fp32 was run.
    assert 1e-4 < error <= 2 * plain_error


@pytest.mark.parametrize("how", ["bf16", "autocast"])
@pytest.mark.parametrize("kind", ["gemma2", "granite", "mixtral"])
def test_other_families_in_half_precision_too(kind, how):
    settings = cases.OTHER_FAMILIES[kind]
    if kind == "mixtral":
        # Every token to every expert: a choice that rounding tips would drown all else.
        settings = {**settings, "num_experts_per_tok": settings["num_local_experts"]}
    lm = tiny_model(kind, VOCAB, initializer_range=0.2, **settings).bfloat16().float()
    pairs = random_pairs(LENGTHS, VOCAB, refs=True)
    truth = oracle_gradient(lm, pairs)
    plain = copy.deepcopy(lm)
    if how == "bf16":
        plain = plain.bfloat16()
        padded_dpo_loss(plain, pairs, beta=BETA).backward()
        ours = one_step_gradient(lm, pairs, zero(3), bf16=True)
    else:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = padded_dpo_loss(plain, pairs, beta=BETA)
        loss.backward()
        ours = one_step_gradient(lm, pairs, {**zero(3), "torch_autocast": {"enabled": True, "dtype": "bfloat16"}})
    plain_error = relative_error({n: p.grad.float() for n, p in plain.named_parameters()}, truth)
    error = relative_error(ours, truth)
    print(kind, how, error, plain_error)
    assert 1e-4 < error <= 2 * plain_error


CPU = {"device": "cpu"}


def three_steps(folder, ds, **settings):
    config = ds_stochdpo.StochDPOConfig(
        beta=BETA, per_device_train_batch_size=2, learning_rate=1e-3, branch="single", position_keep=0.5, **settings
    )
    engine = ds_stochdpo.initialize(model=tiny_llama(), config=config, deepspeed=ds)
    for _ in range(3):
        engine.train_step(random_pairs(LENGTHS, VOCAB, refs=True))
    engine.export(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("checkpointing", [False, True])
def test_offload_to_host_memory_changes_no_step(tmp_path, checkpointing):
    settings = {"gradient_checkpointing": checkpointing}
    resident = three_steps(tmp_path / "resident", zero(3), **settings)
    assert relative_error({n: p.detach() for n, p in tiny_llama().named_parameters()}, resident) > 1e-3
    for more in ({"offload_optimizer": CPU}, {"offload_optimizer": CPU, "offload_param": CPU}):
        offloaded = three_steps(tmp_path / "offloaded", zero(3, **more), **settings)
        assert relative_error(offloaded, resident) < 1e-6


@pytest.mark.timeout(900)
def test_the_cpu_adam_of_deepspeed_takes_the_same_steps(tmp_path):
    """The JSON asks for an optimizer that is compiled at start, so this test compiles it."""
    adam = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0}}}
    offloaded = three_steps(tmp_path / "adam", {**adam, **zero(3, offload_optimizer=CPU)})
    resident = three_steps(tmp_path / "resident", zero(3))
    assert relative_error(offloaded, resident) < 1e-6
