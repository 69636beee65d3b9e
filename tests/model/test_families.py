"""Each family in two lanes against the model's own forward of each branch alone: scores and all gradients."""

import copy

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ds_stochdpo.model import FAMILIES, ScoringOptions, TwoLaneModel
from ds_stochdpo.model.attention import sdpa_backend
from ds_stochdpo.packing import pack_lanes
from ds_stochdpo.pruning.draws import BranchDraw, PairDraw
from tests.oracle import branch_logps, random_pairs, relative_error

VOCAB = 61
GQA = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
           max_position_embeddings=128, vocab_size=VOCAB)  # fmt: skip
# The pad token of these families lies outside the tiny vocabulary.
NO_PAD = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": 1}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 5}
# Caps low enough, and multipliers far enough from 1, to move every score.
MULTIPLIERS = dict(embedding_multiplier=3.0, residual_multiplier=0.6, attention_multiplier=0.5, logits_scaling=0.4)
CONFIGS = {
    "llama": GQA,
    "mistral": {**GQA, "sliding_window": 6},
    "qwen2": {**GQA, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {**GQA, "head_dim": 16},
    "phi3": {**GQA, **NO_PAD, "sliding_window": 6, "partial_rotary_factor": 0.5, "resid_pdrop": 0.1},
    "olmo2": {**GQA, **NO_PAD},
    "smollm3": {**GQA, **NO_PAD, "no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 5},
    "gemma2": {**GQA, **ALTERNATING, "head_dim": 16, "query_pre_attn_scalar": 4, "attn_logit_softcapping": 2.0,
               "final_logit_softcapping": 3.0},
    "gemma3_text": {**GQA, **ALTERNATING, "head_dim": 16, "query_pre_attn_scalar": 4, "final_logit_softcapping": 3.0},
    "granite": {**GQA, **NO_PAD, **MULTIPLIERS},
    "qwen3_moe": {**GQA, "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                  "mlp_only_layers": [1], "norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 5},
    "mixtral": {**GQA, **NO_PAD, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 6,
                "router_jitter_noise": 0.1},
    "gpt2": dict(n_embd=32, n_layer=3, n_head=4, n_positions=128, vocab_size=VOCAB, resid_pdrop=0.1),
}  # fmt: skip
# Root-mean-square norms pass through fp32 inside transformers, so only GPT-2 is exact to float64.
TOLERANCE = {"gpt2": 1e-12}
FP32_NORM = 2e-6
LENGTHS = [(5, 7, 4), (3, 1, 9), (9, 6, 6), (1, 2, 1)]


def tiny(kind, tie=False, seed=0, dtype=torch.float64, **changes):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**CONFIGS[kind], **changes}, tie_word_embeddings=tie)
    # Gemma2 has no sdpa form in transformers.
    config._attn_implementation = "eager" if kind == "gemma2" else "sdpa"
    if dtype == torch.float64:
        # grouped_mm, the default, knows no float64.
        config._experts_implementation = "eager"
    lm = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    for p in lm.parameters():
        # Biases and norms start at constants; random ones catch a module that is skipped.
        p.data += 0.1 * torch.randn_like(p)
    return lm


def sampled(length, rng, whole=False):
    prefix = length if whole else int(rng.integers(1, length + 1))
    kept = np.flatnonzero(rng.random(prefix) < (1.1 if whole else 0.6))
    return BranchDraw(prefix, kept, np.ones(len(kept)) if whole else rng.uniform(1, 4, len(kept)))


def draws_for(pairs, kept, whole, seed=0):
    rng = np.random.default_rng(seed)
    return [PairDraw(sampled(len(p.chosen_ids), rng, whole), sampled(len(p.rejected_ids), rng, whole), k)
            for p, k in zip(pairs, kept, strict=True)]  # fmt: skip


def oracle(lm, pairs, draws, coefficients, shares_start):
    """Weighted score of each slot and the gradient of sum(coefficient * score) over the kept branches."""
    sums, loss = [], 0.0
    for pair, draw, coefficient in zip(pairs, draws, coefficients, strict=True):
        start = pair.shared_start if shares_start else 0
        for branch in ("chosen", "rejected"):
            logps = branch_logps(lm, pair.prompt_ids, getattr(pair, f"{branch}_ids"))
            drawn = getattr(draw, branch)
            own = drawn.positions >= start
            score = (logps[drawn.positions[own]] * torch.from_numpy(drawn.weights[own])).sum()
            sums.append(score.item())
            if draw.kept in ("both", branch):
                loss = loss + coefficient[branch] * score
        sums.append(logps[:start].sum().item())
    lm.zero_grad()
    loss.backward()
    return sums, {n: p.grad.clone() for n, p in lm.named_parameters()}


def run(model, layout, coefficients):
    live_logp, frozen_logp = model(layout)
    rows = (layout.live_rows, layout.detached_rows, layout.frozen_rows)
    logp = torch.cat([live_logp, frozen_logp]).detach()
    slots = torch.cat([r.slot_K for r in rows])
    sums = torch.zeros(3 * layout.num_pairs, dtype=torch.float64)
    sums.index_add_(0, slots, logp * torch.cat([r.weight_K for r in rows]))
    table = torch.tensor([[c["chosen"], c["rejected"], 0.0] for c in coefficients], dtype=torch.float64).flatten()
    loss = (table[layout.live_rows.slot_K] * layout.live_rows.weight_K * live_logp).sum()
    model.zero_grad()
    loss.backward()
    return sums.tolist(), {n.removeprefix("lm."): p.grad.clone() for n, p in model.named_parameters()}


COEFFICIENTS = [{"chosen": -0.7, "rejected": 0.3}, {"chosen": 1.1, "rejected": -0.4},
                {"chosen": 0.2, "rejected": 0.9}, {"chosen": -1.3, "rejected": 0.8}]  # fmt: skip
KEPT = {
    "both": ["both"] * 4,
    "single": ["chosen", "rejected", "rejected", "chosen"],
    "mixed": ["both", "chosen", "both", "rejected"],
}


@pytest.mark.parametrize("shared", [0, 2], ids=["distinct", "sharedstart"])
@pytest.mark.parametrize("share_prompt", [True, False], ids=["shared", "apart"])
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("kind", CONFIGS)
def test_scores_and_gradients_equal_each_branch_alone(kind, kept, share_prompt, shared):
    lm = tiny(kind, tie=shared == 0)
    pairs = random_pairs(LENGTHS, VOCAB, shared=shared)
    draws = draws_for(pairs, KEPT[kept], whole=kept == "mixed", seed=shared)
    want_sums, want_grads = oracle(copy.deepcopy(lm), pairs, draws, COEFFICIENTS, shares_start=True)
    layout = pack_lanes(pairs, draws, share_prompt=share_prompt)
    model = TwoLaneModel(lm, sdpa_backend, ScoringOptions(chunk_rows=3))
    sums, grads = run(model, layout, COEFFICIENTS)
    tolerance = TOLERANCE.get(kind, FP32_NORM)
    assert sums == pytest.approx(want_sums, rel=tolerance, abs=tolerance)
    assert relative_error(grads, want_grads) < tolerance
    for name in grads:
        torch.testing.assert_close(grads[name], want_grads[name], rtol=10 * tolerance, atol=10 * tolerance, msg=name)


@pytest.mark.parametrize("kind", CONFIGS)
def test_checkpointing_and_kept_chunks_change_nothing(kind):
    pairs = random_pairs(LENGTHS, VOCAB, shared=1)
    draws = draws_for(pairs, KEPT["mixed"], whole=False, seed=3)
    layout = pack_lanes(pairs, draws)
    plain = run(TwoLaneModel(tiny(kind), sdpa_backend), layout, COEFFICIENTS)
    options = ScoringOptions(chunk_rows=2, recompute=False)
    other = run(TwoLaneModel(tiny(kind), sdpa_backend, options, gradient_checkpointing=True), layout, COEFFICIENTS)
    assert other[0] == pytest.approx(plain[0], abs=1e-12)
    assert relative_error(other[1], plain[1]) < 1e-12


@pytest.mark.parametrize("packed", [True, False], ids=["together", "alone"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_fp32_with_the_implementations_transformers_chooses(kind, packed, record_property):
    """In training mode, as the engine runs it: no dropout, no router noise, experts by grouped_mm."""
    lm = tiny(kind, dtype=torch.float32)
    pairs = random_pairs(LENGTHS, VOCAB, shared=1)
    draws = draws_for(pairs, KEPT["single"], whole=False, seed=4)
    want_sums, want_grads = oracle(copy.deepcopy(lm), pairs, draws, COEFFICIENTS, shares_start=True)
    model = TwoLaneModel(lm.train(), sdpa_backend)
    groups = [range(len(pairs))] if packed else [[i] for i in range(len(pairs))]
    sums, grads = [], {n: torch.zeros_like(g) for n, g in want_grads.items()}
    for group in groups:
        layout = pack_lanes([pairs[i] for i in group], [draws[i] for i in group])
        own_sums, own_grads = run(model, layout, [COEFFICIENTS[i] for i in group])
        sums += own_sums
        grads = {n: g + own_grads[n] for n, g in grads.items()}
    errors = {"scores": max(abs(a / b - 1) for a, b in zip(sums, want_sums, strict=True) if b),
              "gradients": relative_error(grads, want_grads)}  # fmt: skip
    record_property("errors", errors)
    print(kind, errors)
    assert max(errors.values()) < 1e-5


# What each family adds to Llama, switched off: the cases above prove nothing about a setting that changes no score.
NEUTRAL = {
    "mistral": [{"sliding_window": None}],
    "qwen2": [{"use_sliding_window": False}],
    "phi3": [{"sliding_window": None}, {"partial_rotary_factor": 1.0}],
    "smollm3": [{"no_rope_layers": [1, 1, 1], "use_sliding_window": False}, {"use_sliding_window": False}],
    "gemma2": [{"sliding_window": None}, {"attn_logit_softcapping": None}, {"final_logit_softcapping": None}],
    "gemma3_text": [{"sliding_window": 128}, {"final_logit_softcapping": None},
                    {"rope_parameters": {t: {"rope_type": "default", "rope_theta": 1e4}
                                         for t in ("sliding_attention", "full_attention")}}],
    "granite": [{name: 1.0} for name in MULTIPLIERS],
    "qwen3_moe": [{"use_sliding_window": False}, {"num_experts_per_tok": 1}, {"norm_topk_prob": False}],
    "mixtral": [{"sliding_window": None}, {"num_experts_per_tok": 1}],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "neutral"), [(k, n) for k, ns in NEUTRAL.items() for n in ns], ids=str)
def test_each_setting_of_a_family_moves_the_scores(kind, neutral):
    pairs = random_pairs(LENGTHS, VOCAB, shared=1)
    layout = pack_lanes(pairs, draws_for(pairs, KEPT["mixed"], whole=True))
    with torch.no_grad():
        live, frozen = TwoLaneModel(tiny(kind), sdpa_backend)(layout)
        other_live, other_frozen = TwoLaneModel(tiny(kind, **neutral), sdpa_backend)(layout)
    assert (live - other_live).abs().max() > 1e-3
    assert (frozen - other_frozen).abs().max() > 1e-3


def test_every_supported_family_is_tested():
    assert set(CONFIGS) == set(FAMILIES)
