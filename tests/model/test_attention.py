"""The attention seam: what reaches the varlen kernels, tiles of the sdpa backend, and the choice."""

import importlib.machinery
import importlib.util
import itertools
import sys
import types

import pytest
import torch

from ds_stochdpo.errors import ConfigError, ModelError
from ds_stochdpo.model import ScoringOptions, TwoLaneModel, attention, choose_backend, tiles
from ds_stochdpo.model.attention import (
    LaneCall,
    flash_backend,
    lane_attention,
    sdpa_backend,
    torch_varlen_backend,
)
from ds_stochdpo.packing import AttentionSegments, pack_lanes
from tests.model.test_families import (
    COEFFICIENTS,
    CONFIGS,
    KEPT,
    LENGTHS,
    TOLERANCE,
    VOCAB,
    draws_for,
    run,
    tiny,
)
from tests.model.varlen_reference import FlashSpy, TorchVarlenSpy, explicit_attention, parameters_of
from tests.oracle import random_pairs, relative_error

SPIES = {"flash": (FlashSpy, flash_backend), "torch": (TorchVarlenSpy, torch_varlen_backend)}
WITHOUT_SOFTCAP = [("torch", "gemma2")]
NUM_LAYERS = 3


def mixed_layout(**options):
    pairs = random_pairs(LENGTHS, VOCAB, shared=1)
    return pack_lanes(pairs, draws_for(pairs, KEPT["mixed"], whole=True), **options)


def through(backend, kind, layout):
    return run(TwoLaneModel(tiny(kind), backend, ScoringOptions(chunk_rows=4)), layout, COEFFICIENTS)


@pytest.mark.parametrize("share_prompt", [True, False], ids=["shared", "apart"])
@pytest.mark.parametrize(("seam", "kind"), [(s, k) for s in SPIES for k in CONFIGS if (s, k) not in WITHOUT_SOFTCAP])
def test_whole_model_through_a_varlen_kernel_equals_sdpa(seam, kind, share_prompt):
    spy_class, backend_of = SPIES[seam]
    layout = mixed_layout(share_prompt=share_prompt)
    want_sums, want_grads = through(sdpa_backend, kind, layout)
    spy = spy_class()
    sums, grads = through(backend_of(spy), kind, layout)
    # The fp32 norms inside transformers round 1e-16 apart inputs to 1e-8 apart outputs now and then.
    tolerance = TOLERANCE.get(kind, 1e-7)
    assert sums == pytest.approx(want_sums, abs=tolerance)
    assert relative_error(grads, want_grads) < tolerance
    # One call a lane and layer: the live lane with gradient, the frozen one without.
    assert [c.has_grad for c in spy.calls] == [True, False] * NUM_LAYERS


@pytest.mark.parametrize("seam", SPIES)
def test_kernel_gets_the_segments_of_both_lanes(seam):
    spy_class, backend_of = SPIES[seam]
    layout = mixed_layout()
    spy = spy_class()
    through(backend_of(spy), "llama", layout)
    lanes = (layout.live, layout.frozen)
    for call, lane in zip(spy.calls, lanes * NUM_LAYERS, strict=True):
        assert tuple(call.q_lens) == lane.segments.q_lens
        assert tuple(call.k_lens) == lane.segments.k_lens
        assert call.q_shape == (sum(call.q_lens), 4, 8)
        assert call.k_shape == (sum(call.k_lens), 2, 8)
        assert call.scale == pytest.approx(8**-0.5, rel=1e-15)
        assert call.enable_gqa is (True if seam == "torch" else None)
    # Both lanes hold a segment whose queries see keys of an earlier one, else the case proves little.
    assert all(any(q < k for q, k in zip(c.q_lens, c.k_lens, strict=True)) for c in spy.calls)


@pytest.mark.parametrize("seam", SPIES)
def test_without_frozen_tokens_the_kernel_is_called_for_the_live_lane_alone(seam):
    spy_class, backend_of = SPIES[seam]
    pairs = random_pairs([(3, 1, 1), (2, 4, 1)], VOCAB)
    # A dropped response of one token is scored from the prompt: it has no input of its own.
    layout = pack_lanes(pairs, draws_for(pairs, ["chosen", "chosen"], whole=True))
    spy = spy_class()
    want = through(sdpa_backend, "gpt2", layout)
    assert through(backend_of(spy), "gpt2", layout)[0] == pytest.approx(want[0], abs=1e-12)
    assert [c.has_grad for c in spy.calls] == [True] * NUM_LAYERS
    assert [c.q_lens for c in spy.calls] == [[3, 5]] * NUM_LAYERS


def test_kernel_runs_segments_of_one_token():
    spy = FlashSpy()
    pairs = random_pairs([(1, 1, 1), (1, 2, 1), (4, 6, 2)], VOCAB)
    layout = pack_lanes(pairs, draws_for(pairs, ["both", "rejected", "chosen"], whole=True))
    want = through(sdpa_backend, "gpt2", layout)
    got = through(flash_backend(spy), "gpt2", layout)
    assert got[0] == pytest.approx(want[0], abs=1e-12)
    assert relative_error(got[1], want[1]) < 1e-12
    assert 1 in spy.calls[0].q_lens
    assert 1 in spy.calls[1].q_lens


WINDOWS = dict(
    [
        ("llama", [None, None, None]),
        ("mistral", [6, 6, 6]),
        ("qwen2", [None, 5, 5]),
        ("qwen3_moe", [5, 5, 5]),
        ("mixtral", [6, 6, 6]),
        ("phi3", [6, 6, 6]),
        ("smollm3", [None, 5, None]),
        ("gemma3_text", [5, None, 5]),
        ("gemma2", [5, None, 5]),
        ("gpt2", [None, None, None]),
    ]
)


@pytest.mark.parametrize(("seam", "kind"), [(s, k) for s in SPIES for k in WINDOWS if (s, k) not in WITHOUT_SOFTCAP])
def test_windows_reach_the_kernel_per_layer(seam, kind):
    windows = WINDOWS[kind]
    spy_class, backend_of = SPIES[seam]
    spy = spy_class()
    through(backend_of(spy), kind, mixed_layout())
    open_window = {"flash": (-1, -1), "torch": (-1, 0)}[seam]
    want = [open_window if w is None else (w - 1, 0) for w in windows]
    assert [c.window for c in spy.calls[0::2]] == want
    assert [c.window for c in spy.calls[1::2]] == want
    longest = max(mixed_layout().live.segments.k_lens)
    for call, window in zip(spy.calls[0::2], windows, strict=True):
        assert max(call.key_counts) == (longest if window is None else window)
        assert min(call.key_counts) == 1


@pytest.mark.parametrize(("kind", "softcap"), [("gemma2", 2.0), ("gemma3_text", 0.0), ("llama", 0.0)])
def test_the_soft_cap_reaches_flash_attention(kind, softcap):
    spy = FlashSpy()
    through(flash_backend(spy), kind, mixed_layout())
    assert [c.softcap for c in spy.calls] == [softcap] * (2 * NUM_LAYERS)


def test_torch_varlen_refuses_a_soft_cap():
    with pytest.raises(ModelError, match=r"no soft cap.*caps its scores at 2\.0"):
        through(torch_varlen_backend(TorchVarlenSpy()), "gemma2", mixed_layout())


def test_spy_has_the_signature_of_torch_varlen():
    from torch.nn.attention.varlen import varlen_attn

    assert parameters_of(TorchVarlenSpy()) == parameters_of(varlen_attn)


def test_the_reference_itself_is_causal_at_the_last_key():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 2, 4), torch.randn(5, 1, 4), torch.randn(5, 1, 4)
    counts = []
    whole = explicit_attention(q, k, v, 0.5, (-1, 0), counts)
    assert counts == [4, 5]
    weights = torch.softmax(0.5 * q[0] @ k[:4, 0].T, -1)
    torch.testing.assert_close(whole[0], weights @ v[:4, 0])
    counts.clear()
    assert not torch.allclose(explicit_attention(q, k, v, 0.5, (1, 0), counts), whole)
    assert counts == [2, 2]


def tensors(q_lens, k_lens, heads=4, kv_heads=2, dim=8, seed=0):
    torch.manual_seed(seed)
    query = torch.randn(1, heads, sum(q_lens), dim, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(1, kv_heads, sum(k_lens), dim, dtype=torch.float64, requires_grad=True) for _ in range(2))
    return query, key, value


def with_gradients(backend, inputs, segments, window, softcap=None):
    output = backend(*inputs, segments, 0.3, window, softcap)
    probe = torch.sin(torch.arange(output.numel(), dtype=torch.float64)).view_as(output)
    return [output, *torch.autograd.grad((output * probe).sum(), inputs)]


Q_LENS, K_LENS = (7, 1, 4, 9, 1), (7, 1, 11, 12, 6)


@pytest.mark.parametrize("window", [None, 1, 2, 5, 6, 7, 8, 11, 12, 50])
@pytest.mark.parametrize("elements", [1, 24, 36, 2**22], ids=["rows", "two", "three", "whole"])
def test_sdpa_tiles_equal_the_explicit_softmax(monkeypatch, elements, window):
    inputs, segments = tensors(Q_LENS, K_LENS), AttentionSegments(Q_LENS, K_LENS)
    want = with_gradients(flash_backend(FlashSpy()), inputs, segments, window)
    monkeypatch.setattr(attention, "MASK_ELEMENTS", elements)
    got = with_gradients(sdpa_backend, inputs, segments, window)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [None, 1, 5, 7, 12, 50])
@pytest.mark.parametrize("elements", [1, 96, 144, 2**22], ids=["rows", "two", "three", "whole"])
def test_capped_tiles_equal_the_explicit_softmax(monkeypatch, elements, window):
    inputs, segments = tensors(Q_LENS, K_LENS), AttentionSegments(Q_LENS, K_LENS)
    want = with_gradients(flash_backend(FlashSpy()), inputs, segments, window, softcap=0.7)
    monkeypatch.setattr(tiles, "SCORE_ELEMENTS", elements)
    got = with_gradients(sdpa_backend, inputs, segments, window, softcap=0.7)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    uncapped = with_gradients(sdpa_backend, inputs, segments, window)
    assert window == 1 or (uncapped[0] - got[0]).abs().max() > 1e-2


def test_capped_tiles_hold_no_more_scores_than_allowed_and_rebuild_them_for_the_backward_pass(monkeypatch):
    scores = []
    real = torch.tanh
    monkeypatch.setattr(tiles.torch, "tanh", lambda x: scores.append(x.numel()) or real(x))
    monkeypatch.setattr(tiles, "SCORE_ELEMENTS", 96)
    output = sdpa_backend(*tensors(Q_LENS, K_LENS), AttentionSegments(Q_LENS, K_LENS), 0.3, None, 0.7)
    forward = list(scores)
    assert 0 < max(forward) <= 96
    output.sum().backward()
    assert sorted(scores) == sorted(forward * 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_capped_scores_of_16_bit_inputs_are_computed_in_fp32(dtype):
    inputs = [x.detach().to(dtype) for x in tensors(Q_LENS, K_LENS)]
    segments = AttentionSegments(Q_LENS, K_LENS)
    got = sdpa_backend(*inputs, segments, 0.3, None, 0.7)
    want = sdpa_backend(*(x.float() for x in inputs), segments, 0.3, None, 0.7)
    assert got.dtype == dtype
    assert torch.equal(got, want.to(dtype))
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(sdpa_backend(*inputs, segments, 0.3, None, 0.7), got)


def test_sdpa_tiles_hold_no_more_mask_elements_than_allowed(monkeypatch):
    masks = []
    real = attention.F.scaled_dot_product_attention

    def watched(*args, attn_mask=None, **kwargs):
        masks.append(0 if attn_mask is None else attn_mask.numel())
        return real(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(attention, "MASK_ELEMENTS", 24)
    sdpa_backend(*tensors(Q_LENS, K_LENS), AttentionSegments(Q_LENS, K_LENS), 0.3, None)
    assert max(masks) <= 24
    # Equal lengths without a window need no mask at all.
    assert masks.count(0) == sum(q == k for q, k in zip(Q_LENS, K_LENS, strict=True))


@pytest.mark.parametrize("window", [None, 3])
def test_a_segment_sees_nothing_of_another(window):
    query, key, value = tensors(Q_LENS, K_LENS)
    segments = AttentionSegments(Q_LENS, K_LENS)
    output = sdpa_backend(query, key, value, segments, 0.3, window)
    ends, key_ends = (list(itertools.accumulate(lens, initial=0)) for lens in (Q_LENS, K_LENS))
    for i, (start, stop) in enumerate(itertools.pairwise(ends)):
        (grad,) = torch.autograd.grad(output[:, start:stop].sum(), value, retain_graph=True)
        reached = grad.abs().sum((0, 1, 3)).nonzero().flatten()
        seen = K_LENS[i] if window is None else min(K_LENS[i], Q_LENS[i] + window - 1)
        assert reached.tolist() == list(range(key_ends[i + 1] - seen, key_ends[i + 1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["auto", "sdpa"])
def test_cpu_runs_sdpa(name, dtype):
    assert choose_backend(name, torch.device("cpu"), dtype) == ("sdpa", sdpa_backend)


@pytest.mark.parametrize("name", ["flash_attn", "torch"])
def test_a_kernel_forced_on_cpu_is_refused_with_the_reason(name):
    with pytest.raises(ConfigError, match=rf"attn_implementation is {name}.*CUDA.*here is cpu with torch\.float32"):
        choose_backend(name, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("name", ["flash_attn", "torch"])
def test_a_kernel_forced_in_fp32_is_refused_on_cuda_too(name):
    with pytest.raises(ConfigError, match=r"16-bit.*here is cuda with torch\.float32.*bf16: true"):
        choose_backend(name, torch.device("cuda"), torch.float32)


def test_torch_forced_on_a_model_with_a_soft_cap_is_refused():
    with pytest.raises(ConfigError, match=r"attn_implementation is torch.*no soft cap.*flash_attn, sdpa or auto"):
        choose_backend("torch", torch.device("cuda"), torch.bfloat16, caps_attention=True)


def hide_flash(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None)


def fake_flash(monkeypatch, function):
    module = types.ModuleType("flash_attn")
    module.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    module.flash_attn_varlen_func = function
    monkeypatch.setitem(sys.modules, "flash_attn", module)


def test_forced_flash_without_the_package_names_the_extra(monkeypatch):
    hide_flash(monkeypatch)
    with pytest.raises(ConfigError, match=r"attn_implementation is flash_attn.*ds_stochdpo\[flash\]"):
        choose_backend("flash_attn", torch.device("cuda"), torch.bfloat16)


def test_half_precision_on_cuda_prefers_flash_then_torch(monkeypatch):
    cuda = torch.device("cuda")
    hide_flash(monkeypatch)
    assert choose_backend("auto", cuda, torch.bfloat16)[0] == "torch"
    assert choose_backend("auto", cuda, torch.float32) == ("sdpa", sdpa_backend)
    assert choose_backend("auto", cuda, torch.bfloat16, caps_attention=True) == ("sdpa", sdpa_backend)
    monkeypatch.undo()
    spy = FlashSpy()
    fake_flash(monkeypatch, spy)
    name, backend = choose_backend("auto", cuda, torch.float16)
    assert name == "flash_attn"
    inputs = tensors((2, 3), (4, 3))
    backend(*inputs, AttentionSegments((2, 3), (4, 3)), 0.3, None)
    assert [c.k_lens for c in spy.calls] == [[4, 3]]


def attend_once(**changes):
    query, key, value = tensors((3,), (3,))
    lane = LaneCall(AttentionSegments((3,), (3,)), sdpa_backend)
    call = {"attention_mask": None, "lane": lane, **changes}
    return lane_attention(torch.nn.Module(), query, key, value, **call)


def test_attention_outside_a_lane_is_refused():
    with pytest.raises(ModelError, match=r"two-lane training form.*export"):
        attend_once(lane=None)


@pytest.mark.parametrize("name", ["s_aux", "position_bias", "head_mask"])
def test_attention_that_would_change_scores_is_refused(name):
    with pytest.raises(ModelError, match=f"attention asks for {name}"):
        attend_once(**{name: 0.0})
    attend_once(**{name: None})


def test_a_mask_is_refused():
    with pytest.raises(ModelError, match="got a mask"):
        attend_once(attention_mask=torch.ones(1, 1, 3, 3))


def test_default_scale_is_that_of_the_head_dim():
    torch.testing.assert_close(attend_once()[0], attend_once(scaling=8**-0.5)[0], rtol=0, atol=0)
    assert not torch.equal(attend_once()[0], attend_once(scaling=1.0)[0])


def test_dropout_is_ignored():
    torch.testing.assert_close(attend_once(dropout=0.9)[0], attend_once()[0], rtol=0, atol=0)


def test_prompt_is_captured_once_and_without_gradient():
    query, key, value = tensors((4,), (4,))
    rows = torch.tensor([0, 2])
    lane = LaneCall(AttentionSegments((4,), (4,)), sdpa_backend, capture_rows_C=rows)
    lane_attention(torch.nn.Module(), query, key, value, None, lane=lane)
    assert torch.equal(lane.prompt_keys, key[:, :, rows])
    assert torch.equal(lane.prompt_values, value[:, :, rows])
    assert not lane.prompt_keys.requires_grad
    assert not lane.prompt_values.requires_grad
    lane.is_open, lane.prompt_keys, lane.prompt_values = False, None, None
    lane_attention(torch.nn.Module(), query, key, value, None, lane=lane)
    assert lane.prompt_keys is None
    assert lane.prompt_values is None


def test_captured_prompt_comes_before_the_lanes_own_keys():
    prompt_key, prompt_value = (x[:, :2, :3] for x in tensors((3,), (3,), seed=5)[1:])
    query, key, value = tensors((2, 1), (2, 1))
    index = torch.tensor([0, 1, 2, 3, 4, 1, 5])
    segments = AttentionSegments((2, 1), (5, 2), index)
    lane = LaneCall(segments, sdpa_backend, None, prompt_key, prompt_value)
    output, _ = lane_attention(torch.nn.Module(), query, key, value, None, lane=lane)
    source = [torch.cat(parts, 2)[:, :, index] for parts in ((prompt_key, key), (prompt_value, value))]
    want = flash_backend(FlashSpy())(query, *source, segments, 8**-0.5, None)
    torch.testing.assert_close(output, want, rtol=0, atol=1e-12)
