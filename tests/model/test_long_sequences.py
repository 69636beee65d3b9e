"""What keeps memory flat as sequences grow changes no score and no gradient: tiled MLPs, saved inputs on the host."""

import weakref

import pytest
import torch

from ds_stochdpo.model import ScoringOptions, TwoLaneModel, attention, tiles
from ds_stochdpo.model.attention import sdpa_backend
from ds_stochdpo.model.offload import HostOffload
from ds_stochdpo.packing import pack_lanes
from tests.lifetimes import Lifetimes
from tests.model.test_families import COEFFICIENTS, CONFIGS, KEPT, LENGTHS, VOCAB, draws_for, run, tiny
from tests.oracle import random_pairs, relative_error

# Smaller than either lane, and no divisor of them.
TILE = 5
OPTIONS = {
    "tiled": {"mlp_tile_tokens": TILE},
    "tiled-recompute": {"mlp_tile_tokens": TILE, "gradient_checkpointing": True},
    "tiled-recompute-offload": {"mlp_tile_tokens": TILE, "gradient_checkpointing": True, "activation_offload": True},
}


class FakeMover:
    """Copies within the same memory, and keeps a diary; the copies on the "device" can be counted."""

    def __init__(self):
        self.diary, self.on_device, self.most, self.numbers = [], [], 0, {}

    def to_host(self, tensor):
        host = tensor.clone()
        self.numbers[id(host)] = len(self.numbers)
        self.diary.append(("out", self.numbers[id(host)]))
        return host

    def to_device(self, host):
        tensor = host.clone()
        self.on_device = [r for r in self.on_device if r() is not None] + [weakref.ref(tensor)]
        self.most = max(self.most, len(self.on_device))
        self.diary.append(("back", self.numbers[id(host)]))
        return tensor

    def wait(self, tensor):
        self.diary.append("wait")


def mixed_layout(seed=3):
    pairs = random_pairs(LENGTHS, VOCAB, shared=1)
    return pack_lanes(pairs, draws_for(pairs, KEPT["mixed"], whole=False, seed=seed))


def scores_and_gradients(kind, mover=None, train=False, dtype=torch.float64, **options):
    model = TwoLaneModel(tiny(kind, dtype=dtype).train(train), sdpa_backend, ScoringOptions(chunk_rows=3), **options)
    if mover:
        model.lane_state.offload = HostOffload(mover)
    return run(model, mixed_layout(), COEFFICIENTS)


@pytest.mark.parametrize("kind", CONFIGS)
def test_options_change_no_score_and_no_gradient(kind):
    want_sums, want_grads = scores_and_gradients(kind)
    for options in OPTIONS.values():
        mover = FakeMover() if options.get("activation_offload") else None
        sums, grads = scores_and_gradients(kind, mover, **options)
        assert sums == pytest.approx(want_sums, rel=1e-12, abs=1e-12)
        assert relative_error(grads, want_grads) < 1e-12
        assert mover is None or mover.diary


def test_tiles_of_16_bit_blocks_add_up_in_fp32():
    """The mean over many tiles is as near to the fp32 gradient as that of one block, as the engine trains it."""
    want = scores_and_gradients("llama", dtype=torch.float32)[1]

    def error(**options):
        grads = scores_and_gradients("llama", dtype=torch.bfloat16, **options)[1]
        return relative_error({n: g.float() for n, g in grads.items()}, want)

    assert error(mlp_tile_tokens=1) < 1.2 * error()


def test_autocast_reaches_the_recomputation():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = scores_and_gradients("llama", dtype=torch.float32)[1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = scores_and_gradients("llama", dtype=torch.float32, mlp_tile_tokens=TILE)[1]
    assert relative_error(got, want) < 2e-2
    assert relative_error(got, scores_and_gradients("llama", dtype=torch.float32)[1]) > 1e-5


@pytest.mark.parametrize("kind", ["llama", "olmo2"])
def test_tiles_cost_no_run_beyond_that_of_the_recomputed_layer(kind):
    """Once forward and once backward; only a norm behind the block needs its output a third time."""
    model = TwoLaneModel(tiny(kind), sdpa_backend, gradient_checkpointing=True, mlp_tile_tokens=TILE)
    tokens = 0

    def count(_, args):
        nonlocal tokens
        tokens += args[0].shape[1]

    for layer in model.lm.base_model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(count)
    layout = mixed_layout()
    run(model, layout, COEFFICIENTS)
    live, frozen = len(layout.live.ids_T), len(layout.frozen.ids_T)
    assert tokens == 3 * ((3 if kind == "olmo2" else 2) * live + frozen)


FFN = 88
# Where a family keeps the width of its feed-forward block, and the widths that stand for it inside.
WIDE = {"gpt2": {"n_inner": FFN}, "qwen3_moe": {"intermediate_size": FFN, "moe_intermediate_size": FFN}}


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("kind", CONFIGS)
def test_no_tensor_holds_all_tokens_times_the_feed_forward_block(kind, checkpointing):
    lm = tiny(kind, dtype=torch.float32, **WIDE.get(kind, {"intermediate_size": FFN}))
    model = TwoLaneModel(lm, sdpa_backend, mlp_tile_tokens=TILE, gradient_checkpointing=checkpointing)
    weights = {s for p in model.parameters() for s in (p.shape, p.mT.shape if p.dim() > 1 else p.shape)}
    weights |= {s[1:] for s in weights}
    with Lifetimes(model.parameters()) as seen:
        run(model, mixed_layout(), COEFFICIENTS)
    wide = [s for s in seen.shapes if s and s[-1] in (FFN, 2 * FFN) and s not in weights]
    # Of sparse models a token meets two experts.
    per_token = 2 if model.family.expert_ffn else 1
    rows = {torch.Size(s[:-1]).numel() for s in wide}
    assert rows
    assert max(rows) <= TILE * per_token


MASK_ORIGINS = ("aten.le.", "aten.where.", "aten.bitwise_and")


def mask_bytes_at_the_peak(kind, kept, monkeypatch):
    """Of one pair of 384 tokens, in tiles of at most 2048 mask elements."""
    monkeypatch.setattr(attention, "MASK_ELEMENTS", 2048)
    monkeypatch.setattr(tiles, "SCORE_ELEMENTS", 8192)
    lm = tiny(kind, dtype=torch.float32, max_position_embeddings=512)
    model = TwoLaneModel(lm, sdpa_backend, mlp_tile_tokens=4, gradient_checkpointing=True)
    pairs = random_pairs([(128, 128, 128)], VOCAB)
    layout = pack_lanes(pairs, draws_for(pairs, [kept], whole=True))
    with Lifetimes(model.parameters()) as seen:
        run(model, layout, COEFFICIENTS[:1])
    return sum(s.nbytes for s in seen.at_peak if s.origin.startswith(MASK_ORIGINS))


@pytest.mark.parametrize(("kind", "kept"), [("llama", "both"), ("llama", "chosen"), ("gemma2", "both")])
def test_masks_of_a_long_segment_are_not_kept(kind, kept, monkeypatch):
    """As bool and as the float mask that torch makes of it, one tile takes 2048 x 5 bytes."""
    assert mask_bytes_at_the_peak(kind, kept, monkeypatch) <= 2 * 2048 * 5


def test_masks_that_are_kept_would_be_seen(monkeypatch):
    keep = tiles.attend_in_tiles
    monkeypatch.setattr(attention, "attend_in_tiles", lambda *args, rebuild: keep(*args, rebuild=False))
    assert mask_bytes_at_the_peak("llama", "both", monkeypatch) > 4 * 2048 * 5


def test_saved_inputs_leave_and_come_back_one_layer_ahead():
    mover = FakeMover()
    model = TwoLaneModel(tiny("llama"), sdpa_backend, gradient_checkpointing=True, activation_offload=True)
    assert model.lane_state.offload is not None
    model.lane_state.offload = HostOffload(mover)
    for _ in range(2):
        mover.diary.clear()
        mover.numbers.clear()
        run(model, mixed_layout(), COEFFICIENTS)
        out = [("out", i) for i in range(3)]
        back = [("back", 2), "wait", ("back", 1), "wait", ("back", 0), "wait"]
        assert mover.diary == out + back
    assert mover.most <= 2


def test_without_a_device_apart_from_the_host_nothing_is_copied():
    offload = HostOffload()
    tensor = torch.ones(3, requires_grad=True)
    with offload.saving(tensor):
        saved = (tensor * tensor).grad_fn._saved_self
    assert offload.mover is None
    assert saved is tensor
