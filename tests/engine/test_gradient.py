"""The black-box gradient: SGD with lr 1 and no clipping, so exported weights before minus after ARE the gradient."""

import copy
import itertools

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import ds_stochdpo
from ds_stochdpo.pruning import PairDraw, full_draw
from tests.oracle import padded_dpo_loss, random_pairs, relative_error

VOCAB = 97
BETA = 0.3
pytestmark = pytest.mark.usefixtures("single_process")


def tiny_llama(tie=False):
    torch.manual_seed(1)
    config = LlamaConfig(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
                         tie_word_embeddings=tie, initializer_range=0.2)  # fmt: skip
    return LlamaForCausalLM(config)


def sgd(stage):
    return {
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }


def oracle_gradient(lm, pairs):
    lm = copy.deepcopy(lm)
    padded_dpo_loss(lm, pairs, beta=BETA).backward()
    return {n: p.grad.clone() for n, p in lm.named_parameters()}


def engine_gradient(lm, pairs, draws, folder, stage, **settings):
    config = ds_stochdpo.StochDPOConfig(beta=BETA, per_device_train_batch_size=2, **settings)
    engine = ds_stochdpo.initialize(model=copy.deepcopy(lm), config=config, deepspeed=sgd(stage))
    engine.export(folder / "before")
    metrics = engine.train_step(pairs, draws)
    engine.export(folder / "after")
    before, after = (load_file(folder / name / "model.safetensors") for name in ("before", "after"))
    return {n: before[n] - after[n] for n in before}, metrics


def with_kept(pairs, kept, prob=0.5):
    full = [full_draw(len(p.chosen_ids), len(p.rejected_ids)) for p in pairs]
    return [PairDraw(f.chosen, f.rejected, k, 1.0 if k == "both" else prob) for f, k in zip(full, kept, strict=True)]


def mean(gradients):
    return {n: sum(g[n].double() for g in gradients) / len(gradients) for n in gradients[0]}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_both_branches_give_the_gradient_of_padded_dpo(tmp_path, stage, tie):
    lm, pairs = tiny_llama(tie), random_pairs([(6, 9, 5)], VOCAB, refs=True)
    want = oracle_gradient(lm, pairs)
    got, metrics = engine_gradient(lm, pairs, None, tmp_path, stage)
    assert relative_error(got, want) < 1e-5
    assert metrics["loss"] == pytest.approx(padded_dpo_loss(lm, pairs, beta=BETA).item(), abs=1e-6)
    norm = sum(float((g.double() ** 2).sum()) for g in want.values()) ** 0.5
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_mean_over_both_kept_branches_is_the_gradient(tmp_path):
    lm, pairs = tiny_llama(), random_pairs([(6, 9, 5)], VOCAB, refs=True, shared=2)
    outcomes = [
        engine_gradient(lm, pairs, with_kept(pairs, [kept]), tmp_path / kept, 3)[0] for kept in ("chosen", "rejected")
    ]
    want = oracle_gradient(lm, pairs)
    assert relative_error(mean(outcomes), want) < 1e-5
    # One outcome alone is not the gradient, so the test above can fail.
    assert relative_error(outcomes[0], want) > 0.1


def test_mean_over_all_16_outcomes_of_4_pairs_is_the_gradient(tmp_path):
    lm, pairs = tiny_llama(), random_pairs([(6, 9, 5), (2, 3, 8), (4, 1, 7), (5, 6, 6)], VOCAB, refs=True)
    outcomes = [
        engine_gradient(lm, pairs, with_kept(pairs, kept), tmp_path / "-".join(kept), 0)[0]
        for kept in itertools.product(("chosen", "rejected"), repeat=4)
    ]
    want = oracle_gradient(lm, pairs)
    assert len(outcomes) == 16
    assert relative_error(mean(outcomes), want) < 1e-5
    without_weights = {n: g / 2 for n, g in mean(outcomes).items()}
    assert relative_error(without_weights, want) > 0.4
