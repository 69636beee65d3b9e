"""The CUDA kernels against sdpa: error in bf16 at most twice that of sdpa in bf16, both measured from fp32."""

import copy
import importlib.util

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from ds_stochdpo.config import PruningPlan
from ds_stochdpo.model import ScoringOptions, TwoLaneModel, choose_backend, chunked_logps
from ds_stochdpo.model.attention import flash_backend, sdpa_backend
from ds_stochdpo.packing import AttentionSegments, pack_lanes
from ds_stochdpo.pruning import draw_pairs
from tests.model.varlen_reference import FlashSpy
from tests.oracle import random_pairs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is False"),
]

HAS_FLASH = importlib.util.find_spec("flash_attn") is not None
KERNELS = [
    pytest.param("torch"),
    pytest.param(
        "flash_attn",
        marks=pytest.mark.skipif(not HAS_FLASH, reason="needs flash-attn: the extra ds_stochdpo[flash]"),
    ),
]
TIMES = 2.0
"""How much further from fp32 a kernel may be than sdpa in the same dtype."""
Q_LENS, K_LENS = (130, 1, 40, 257, 1, 64), (130, 1, 300, 257, 90, 65)
VOCAB = 512
DEVICE = "cuda"


def kernel(name):
    chosen, backend = choose_backend(name, torch.device("cuda"), torch.bfloat16)
    assert chosen == name
    return backend


def packed(device, heads=8, kv_heads=2, dim=64, seed=0):
    """Queries, keys and values in bf16."""
    torch.manual_seed(seed)
    shapes = [(heads, sum(Q_LENS)), (kv_heads, sum(K_LENS)), (kv_heads, sum(K_LENS))]
    return [torch.randn(1, h, n, dim, device=device).bfloat16() for h, n in shapes]


def with_gradients(backend, inputs, segments, window, softcap=None):
    inputs = [x.detach().requires_grad_() for x in inputs]
    output = backend(*inputs, segments, 0.125, window, softcap)
    probe = torch.sin(torch.arange(output.numel(), device=output.device)).view_as(output).to(output.dtype)
    return [x.float() for x in (output, *torch.autograd.grad((output * probe).sum(), inputs))]


def assert_near(ours, plain, truth):
    """Each tensor at most `TIMES` as far from the truth as the plain one."""
    for name, a, b, true in zip(("output", "query", "key", "value"), ours, plain, truth, strict=True):
        error, plain_error = ((x - true).norm().item() for x in (a, b))
        assert error <= TIMES * plain_error, f"{name}: {error} against {plain_error}"
        assert error < 0.02 * true.norm().item(), name


def segments_on(device, q_lens=Q_LENS, k_lens=K_LENS):
    segments = AttentionSegments(q_lens, k_lens)
    return AttentionSegments(q_lens, k_lens, None, segments.cu_seqlens_q.to(device), segments.cu_seqlens_k.to(device))


@pytest.mark.parametrize("window", [None, 48], ids=["open", "window"])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)], ids=["plain", "grouped"])
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_and_its_gradients_are_as_near_to_fp32_as_sdpa(name, heads, window):
    inputs = packed(DEVICE, *heads)
    segments = segments_on(DEVICE)
    truth = with_gradients(sdpa_backend, [x.float() for x in inputs], segments, window)
    plain = with_gradients(sdpa_backend, inputs, segments, window)
    assert_near(with_gradients(kernel(name), inputs, segments, window), plain, truth)


@pytest.mark.parametrize("window", [None, 48], ids=["open", "window"])
@pytest.mark.parametrize("name", [pytest.param("sdpa"), *(k for k in KERNELS if k.values[0] == "flash_attn")])
def test_capped_scores_and_their_gradients_are_as_near_to_fp32_as_plain_torch(name, window):
    inputs, segments = packed(DEVICE), segments_on(DEVICE)
    truth = with_gradients(sdpa_backend, [x.float() for x in inputs], segments, window, softcap=1.5)
    plain = with_gradients(flash_backend(FlashSpy()), inputs, segments, window, softcap=1.5)
    backend = choose_backend(name, torch.device("cuda"), torch.bfloat16, caps_attention=True)[1]
    assert_near(with_gradients(backend, inputs, segments, window, softcap=1.5), plain, truth)
    uncapped = with_gradients(sdpa_backend, [x.float() for x in inputs], segments, window)
    assert (uncapped[0] - truth[0]).norm() > 0.05 * truth[0].norm()


@pytest.mark.parametrize("name", KERNELS)
def test_a_shifted_mask_would_be_seen(name):
    """Twin: the same kernel aligned one key off is far outside the tolerance."""
    inputs, segments = packed(DEVICE), segments_on(DEVICE)
    truth = with_gradients(sdpa_backend, [x.float() for x in inputs], segments, None)
    shifted = [x.roll(1, dims=2) if i else x for i, x in enumerate(inputs)]
    output = with_gradients(kernel(name), shifted, segments, None)[0]
    assert (output - truth[0]).norm() > 0.1 * truth[0].norm()


def model_of(kind, device):
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
    }
    torch.manual_seed(0)
    config = LlamaConfig(**sizes) if kind == "llama" else MistralConfig(**sizes, sliding_window=24)
    return AutoModelForCausalLM.from_config(config).to(device)


def layout_on(device):
    lengths = [(40, 60, 33), (7, 1, 90), (64, 20, 20), (3, 50, 1)]
    pairs = random_pairs(lengths, VOCAB, shared=2)
    plan = PruningPlan(0.5, prefix_keep=0.7, prefix_sampler="floor", branch="single")
    draws = draw_pairs(plan, seed=0, epoch=0, step=0, pair_ids=range(4),
                       chosen_lengths=[n for _, n, _ in lengths],
                       rejected_lengths=[n for _, _, n in lengths])  # fmt: skip
    return pack_lanes(pairs, draws).to(device)


def scores_and_gradient(lm, backend, layout, checkpointing=False):
    model = TwoLaneModel(copy.deepcopy(lm), backend, ScoringOptions(32), gradient_checkpointing=checkpointing)
    live, frozen = model(layout)
    (live * layout.live_rows.weight_K.to(live)).sum().backward()
    gradient = torch.cat([p.grad.float().flatten() for p in model.parameters()])
    return torch.cat([live, frozen]).detach(), gradient


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("name", KERNELS)
def test_whole_model_is_as_near_to_fp32_as_with_sdpa(name, kind, checkpointing):
    exact = model_of(kind, DEVICE)
    rounded = copy.deepcopy(exact).bfloat16()
    layout = layout_on(DEVICE)
    truth = scores_and_gradient(copy.deepcopy(rounded).float(), sdpa_backend, layout)
    plain = scores_and_gradient(rounded, sdpa_backend, layout, checkpointing)
    ours = scores_and_gradient(rounded, kernel(name), layout, checkpointing)
    for what, a, b, true in zip(("scores", "gradient"), ours, plain, truth, strict=True):
        error, plain_error = ((x - true).norm().item() for x in (a, b))
        assert error <= TIMES * plain_error, f"{what}: {error} against {plain_error}"
        assert error < 0.05 * true.norm().item(), what


def test_auto_picks_a_varlen_kernel_in_half_precision_and_sdpa_in_fp32():
    want = "flash_attn" if HAS_FLASH else "torch"
    assert choose_backend("auto", torch.device("cuda"), torch.bfloat16)[0] == want
    capped = "flash_attn" if HAS_FLASH else "sdpa"
    assert choose_backend("auto", torch.device("cuda"), torch.bfloat16, caps_attention=True)[0] == capped
    assert choose_backend("auto", torch.device("cuda"), torch.float32)[0] == "sdpa"


def peak_extra_bytes(step):
    """Most memory that `step` held beyond what was there before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_scoring_holds_a_few_chunks_and_the_gradients_and_no_more():
    rows, dim, vocab, chunk_rows = 4096, 512, 64000, 128
    torch.manual_seed(0)
    hidden = torch.randn(rows, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, vocab, (rows,), device="cuda")

    def chunked():
        logp = chunked_logps(hidden, weight, target, ScoringOptions(chunk_rows))
        torch.autograd.grad(logp.sum(), (hidden, weight))

    def full():
        logits = (hidden @ weight.T).float()
        torch.autograd.grad(-F.cross_entropy(logits, target, reduction="sum"), (hidden, weight))

    chunked()  # Warm-up: cuBLAS keeps a workspace.
    full_logits, chunk = 4 * rows * vocab, 4 * chunk_rows * vocab
    # The weight's gradient is summed in fp32, a chunk's share and the result are bf16; the rows' gradient is bf16.
    gradients = (4 + 2 + 2) * vocab * dim + 2 * rows * dim
    assert peak_extra_bytes(chunked) < gradients + 6 * chunk
    assert peak_extra_bytes(full) > full_logits
    assert gradients + 6 * chunk < full_logits / 2


@pytest.mark.skipif(not HAS_FLASH, reason="needs flash-attn: the extra ds_stochdpo[flash]")
def test_spy_has_the_signature_of_flash_attn():
    from flash_attn import flash_attn_varlen_func

    from tests.model.test_attention import parameters_of
    from tests.model.varlen_reference import FlashSpy

    assert parameters_of(FlashSpy()) == parameters_of(flash_attn_varlen_func)
