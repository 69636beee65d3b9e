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
CONFIGS = {
    "llama": GQA,
    "mistral": {**GQA, "sliding_window": 6},
    "qwen2": {**GQA, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {**GQA, "head_dim": 16},
    "gpt2": dict(n_embd=32, n_layer=3, n_head=4, n_positions=128, vocab_size=VOCAB, resid_pdrop=0.1),
}
# Root-mean-square norms pass through fp32 inside transformers, so only GPT-2 is exact to float64.
TOLERANCE = {"gpt2": 1e-12}
FP32_NORM = 2e-6
LENGTHS = [(5, 7, 4), (3, 1, 9), (9, 6, 6), (1, 2, 1)]


def tiny(kind, tie=False, seed=0):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **CONFIGS[kind], tie_word_embeddings=tie)
    config._attn_implementation = "sdpa"
    lm = AutoModelForCausalLM.from_config(config).double().eval()
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
    lm = tiny(kind, tie=kind in ("llama", "gpt2"))
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


def test_every_supported_family_is_tested():
    assert set(CONFIGS) == set(FAMILIES)
