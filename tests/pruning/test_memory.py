"""Predicted bytes of a model's state against numbers worked by hand."""

from dataclasses import replace

import pytest

from ds_stochdpo.pruning.cost import ModelShape
from ds_stochdpo.pruning.memory import Held, StatePlan, model_state, recompute_peak

LLAMA_8B = ModelShape(hidden=4096, layers=32, ffn=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256)


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
