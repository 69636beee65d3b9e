"""Predicted bytes against numbers worked by hand and against what autograd keeps."""

from dataclasses import replace

import pytest
import torch

from ds_stochdpo.pruning.cost import ModelShape
from ds_stochdpo.pruning.memory import (
    Held,
    StatePlan,
    activation_bytes,
    head_bytes,
    model_state,
    recompute_peak,
    unchunked_logits_bytes,
)

LLAMA_8B = ModelShape(hidden=4096, layers=32, ffn=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256)
MIB = 2**20


def test_stage_0_holds_everything_on_every_rank():
    kinds = model_state(10, StatePlan(zero_stage=0, world_size=4, weight_bytes=4))
    assert kinds == {"weights": Held(40), "gradients": Held(40), "optimizer moments": Held(80)}


@pytest.mark.parametrize(
    ("stage", "weights", "gradients"),
    [(1, 2000, 2000), (2, 2000, 500), (3, 500, 500)],
)
def test_each_stage_shards_one_thing_more(stage, weights, gradients):
    """1000 weights in bf16 over 4 ranks: masters 4 bytes, moments 8, a quarter of them on a rank."""
    kinds = model_state(1000, StatePlan(zero_stage=stage, world_size=4, weight_bytes=2))
    assert kinds["weights"] == Held(weights)
    assert kinds["gradients"] == Held(gradients)
    assert kinds["fp32 master weights"] == Held(1000)
    assert kinds["optimizer moments"] == Held(2000)
    assert kinds["fp32 gradients in the optimizer step"] == Held(1000, in_step=True)
    assert ("weights gathered to compute, at most" in kinds) == (stage == 3)


def test_stage_3_gathers_and_updates_no_more_than_it_is_told():
    kinds = model_state(1000, StatePlan(3, 4, weight_bytes=2, sub_group=100, max_live=30))
    assert kinds["weights gathered to compute, at most"] == Held(60)
    assert kinds["fp32 gradients in the optimizer step"] == Held(400, in_step=True)


def test_offload_moves_all_but_the_gathered_weights():
    kinds = model_state(1000, StatePlan(3, 4, weight_bytes=2, optimizer_on_host=True, weights_on_host=True, max_live=9))
    assert sum(held.device for held in kinds.values()) == 18
    # 2 + 2 + 4 + 8 + 4 bytes of 250 weights.
    assert sum(held.host for held in kinds.values()) == 5000
    only_optimizer = model_state(1000, StatePlan(2, 4, weight_bytes=2, optimizer_on_host=True))
    assert sum(held.device for held in only_optimizer.values()) == 2000


def test_sgd_has_no_moments_and_shares_are_rounded_up():
    kinds = model_state(10, StatePlan(3, 4, weight_bytes=4, moments=0))
    assert kinds["optimizer moments"] == Held(0)
    assert kinds["weights"] == Held(12)


def test_layers_of_an_8b_model_by_hand():
    """2 (6 x 4096 + 2 x 1024 + 4 x 14336) = 167936 bytes a live token and layer; 2 x 4096 x 32 = 262144 of inputs."""
    load = {"live_tokens": 1000, "frozen_tokens": 0, "weight_bytes": 2}
    assert activation_bytes(LLAMA_8B, **load, checkpointing=False) == 1000 * 32 * 167_936
    assert activation_bytes(LLAMA_8B, **load, checkpointing=True) == 1000 * (262_144 + 167_936)
    # A frozen token keeps 2 (4 x 4096 + 2 x 14336) bytes, in one layer at a time.
    frozen = activation_bytes(LLAMA_8B, live_tokens=0, frozen_tokens=10, weight_bytes=2, checkpointing=False)
    assert frozen == 10 * 90_112


def test_tiles_and_offload_of_an_8b_model_by_hand():
    """2 (6 x 4096 + 2 x 1024) = 53248 bytes a live token; a tile of 100 tokens holds 2 x 6 x 14336 of each."""
    load = {"live_tokens": 1000, "frozen_tokens": 0, "weight_bytes": 2, "mlp_tile_tokens": 100}
    tile = 100 * 172_032
    assert activation_bytes(LLAMA_8B, **load, checkpointing=False) == 1000 * 32 * 53_248 + tile
    assert activation_bytes(LLAMA_8B, **load, checkpointing=True) == 1000 * (262_144 + 53_248) + tile
    # On the device stay the inputs of two layers: 2 x 4096 x 2 bytes a token.
    assert activation_bytes(LLAMA_8B, **load, checkpointing=True, offload=True) == 1000 * (16_384 + 53_248) + tile


def test_the_peak_of_recomputed_layers_by_hand():
    """(2 x 4 + 5) x 4096 + 2 x 9 x 128 = 55552 values of 2 bytes a live token, beside 32 inputs of 4096."""
    load = {"weight_bytes": 2, "mlp_tile_tokens": 100, "chunk_rows": 64}
    parts = recompute_peak(LLAMA_8B, live_tokens=1000, **load)
    assert parts == {
        "saved layer inputs": 1000 * 262_144,
        "one layer": 1000 * 111_104,
        "one feed-forward tile": 100 * 172_032,
        "one head tile": 8 * 64 * 8192,
    }
    assert recompute_peak(LLAMA_8B, live_tokens=1000, **load, offload=True)["saved layer inputs"] == 1000 * 16_384
    larger = replace(LLAMA_8B, vocab=10 * LLAMA_8B.vocab)
    assert recompute_peak(larger, live_tokens=1000, **load) == parts


def test_head_of_an_8b_model_by_hand():
    head = head_bytes(LLAMA_8B, live_rows=1000, chunk_rows=64, recompute=True, weight_bytes=2)
    assert head == {"chunk": 64 * 8 * 8192, "kept": 0, "gradient": 6 * 128256 * 4096}
    kept = head_bytes(LLAMA_8B, live_rows=1000, chunk_rows=64, recompute=False, weight_bytes=4)
    assert kept == {"chunk": 64 * 8 * 128256, "kept": 4000 * 128256, "gradient": 4 * 128256 * 4096}
    few = head_bytes(LLAMA_8B, live_rows=0, chunk_rows=64, recompute=True, weight_bytes=2)
    assert few == {"chunk": 0, "kept": 0, "gradient": 0}
    # Of 512 positions at once: 751 MiB; 1503 of both branches with their prompts.
    assert round(unchunked_logits_bytes(LLAMA_8B, rows=512) / MIB) == 752


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_layer_keeps_about_what_autograd_saves(kind):
    """Saved tensors of the layers of a small model, weights left out, against the prediction."""
    from tests.tiny import tiny_gpt2, tiny_llama

    tokens = 48
    if kind == "llama":
        lm = tiny_llama(hidden_size=128, intermediate_size=448, num_hidden_layers=3, num_attention_heads=4)
        shape = ModelShape(hidden=128, layers=3, ffn=448, heads=4, kv_heads=2, head_dim=32, vocab=347)
    else:
        lm = tiny_gpt2(n_embd=128, n_layer=3)
        shape = ModelShape(hidden=128, layers=3, ffn=512, heads=4, kv_heads=4, head_dim=32, vocab=347, ffn_matrices=2)
    weights = {p.untyped_storage().data_ptr() for p in lm.parameters()}
    kept = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    lm.set_attn_implementation("sdpa")
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        hidden = lm.base_model(torch.arange(tokens)[None], use_cache=False).last_hidden_state
    saved = sum(storage.nbytes() for storage in kept.values())
    assert hidden.requires_grad
    predicted = activation_bytes(shape, live_tokens=tokens, frozen_tokens=0, weight_bytes=4, checkpointing=False)
    assert predicted == pytest.approx(saved, rel=0.25)


def test_half_the_live_tokens_hold_half():
    load = {"frozen_tokens": 0, "weight_bytes": 2, "checkpointing": True}
    whole = activation_bytes(LLAMA_8B, live_tokens=2000, **load)
    assert whole == 2 * activation_bytes(LLAMA_8B, live_tokens=1000, **load)
