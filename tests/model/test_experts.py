"""Experts and routers in two lanes: the balance that is reported, and what the graph holds."""

import copy

import numpy as np
import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from ds_stochdpo.model import FAMILIES, TwoLaneModel
from ds_stochdpo.model.attention import sdpa_backend
from ds_stochdpo.model.experts import balance_loss
from ds_stochdpo.packing import pack_lanes
from tests.model.gpt2_float64 import full_draws
from tests.model.test_families import COEFFICIENTS, KEPT, LENGTHS, VOCAB, draws_for, run, tiny
from tests.oracle import random_pairs, relative_error

CPU = torch.device("cpu")
KINDS = ["mixtral", "qwen3_moe"]


def gate_logits(lm, rows):
    """Router logits of each sparse layer over all rows, each row alone."""
    layers = [[] for _ in lm.model.layers]
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, out, seen=seen: seen.append(out[0].detach()))
        for layer, seen in zip(lm.model.layers, layers, strict=True)
        if hasattr(layer.mlp, "gate")
    ]
    with torch.no_grad():
        for row in rows:
            lm(input_ids=torch.from_numpy(row)[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return tuple(torch.cat(seen) for seen in layers if seen)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("kind", KINDS)
def test_balance_is_that_of_transformers_over_the_live_tokens_of_all_micro_batches(kind, checkpointing):
    lm = tiny(kind)
    config = lm.config
    pairs = random_pairs(LENGTHS, VOCAB)
    # The last token of a response is never an input.
    rows = [np.concatenate([p.prompt_ids, ids[:-1]]) for p in pairs for ids in (p.chosen_ids, p.rejected_ids)]
    logits = gate_logits(copy.deepcopy(lm), rows)
    want = load_balancing_loss_func(logits, config.num_experts, config.num_experts_per_tok)
    model = TwoLaneModel(lm, sdpa_backend, gradient_checkpointing=checkpointing)
    for group in (pairs[:1], [], pairs[1:]):
        live, _ = model(pack_lanes(group, full_draws(group), share_prompt=False))
        live.sum().backward()
    with torch.no_grad():
        model(pack_lanes(pairs, full_draws(pairs)))
    sums = model.lane_state.routing_sums
    assert len(sums) == 2 * config.num_experts + 1
    # Two ranks that counted the same have the same balance.
    got = model.routing_metrics(lambda x: 2 * x, CPU)
    assert got == {"router/aux_loss": pytest.approx(float(want), rel=1e-6)}
    # Taken once; nothing was counted since, but another rank may have.
    assert np.isnan(model.routing_metrics(lambda x: x, CPU)["router/aux_loss"])
    assert model.routing_metrics(lambda x: x + sums, CPU) == got


@pytest.mark.parametrize("kind", KINDS)
def test_the_frozen_lane_is_not_counted(kind):
    pairs = random_pairs([(4, 5, 3)], VOCAB)
    model = TwoLaneModel(tiny(kind), sdpa_backend)
    model(pack_lanes(pairs, draws_for(pairs, ["chosen"], whole=True)))
    num_sparse = sum(hasattr(layer.mlp, "gate") for layer in model.lm.model.layers)
    assert model.lane_state.routing_sums[-1] == num_sparse * (4 + 5 - 1)


def test_even_routing_has_the_least_balance_loss():
    even = torch.tensor([2.0] * 4 + [1.0] * 4 + [4.0])
    assert balance_loss(even) == pytest.approx(2.0)
    assert balance_loss(torch.tensor([4.0, 4, 0, 0, 2, 2, 0, 0, 4])) == pytest.approx(4.0)


def test_a_dense_model_reports_no_routing():
    assert TwoLaneModel(tiny("llama"), sdpa_backend).routing_metrics(lambda x: x, CPU) == {}


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_use_the_weights_where_they_lie_at_the_backward_pass(kind, implementation):
    """As under ZeRO-3: between forward and backward the weights leave their storage and come back in another."""
    pairs = random_pairs(LENGTHS, VOCAB)
    layout = pack_lanes(pairs, draws_for(pairs, KEPT["mixed"], whole=True))
    lm = tiny(kind, dtype=torch.float32)
    lm.set_experts_implementation(implementation)
    _, want = run(TwoLaneModel(copy.deepcopy(lm), sdpa_backend), layout, COEFFICIENTS)

    model = TwoLaneModel(lm, sdpa_backend)
    table = torch.tensor([[c["chosen"], c["rejected"], 0.0] for c in COEFFICIENTS], dtype=torch.float64).flatten()
    live, _ = model(layout)
    loss = (table[layout.live_rows.slot_K] * layout.live_rows.weight_K * live).sum()
    stacked = [p for n, p in lm.named_parameters() if ".experts." in n]
    assert stacked
    for p in stacked:
        elsewhere = torch.empty(p.numel() + 7)[7:].view(p.shape).copy_(p.data)
        p.data.fill_(float("nan"))
        p.data = elsewhere
    loss.backward()
    got = {n: p.grad for n, p in lm.named_parameters()}
    assert relative_error(got, want) < 1e-6


def test_work_counts_the_experts_a_token_is_given_to():
    widths = {kind: FAMILIES[kind].shape(tiny(kind).config).ffn for kind in (*KINDS, "llama")}
    assert widths == {"mixtral": 2 * 48, "qwen3_moe": 2 * 24, "llama": 48}
