"""Turning a model into its two-lane form: what is refused, what is left alone, and how often each module runs."""

import copy
from collections import Counter

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    BloomConfig,
    BloomForCausalLM,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from ds_stochdpo.errors import ModelError
from ds_stochdpo.model import FAMILIES, TwoLaneModel, families, family_of, family_of_config, two_lane
from ds_stochdpo.model.attention import ATTENTION_NAME, LaneCall, sdpa_backend
from ds_stochdpo.packing import pack_lanes
from tests.model.gpt2_float64 import POLICY, Run, full_draws, gap, keep, scored_pairs, tiny_gpt2
from tests.model.test_families import CONFIGS, KEPT, LENGTHS, VOCAB, draws_for, tiny
from tests.oracle import branch_logps, random_pairs

PAIRS = scored_pairs([(4, 5, 3), (2, 3, 6)])
IDS = torch.arange(3, 9)[None]


def tiny_llama(**config):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes, **config))


UNSUPPORTED = {
    "bloom": (
        lambda: BloomForCausalLM(BloomConfig(vocab_size=31, hidden_size=16, n_layer=1, n_head=2)),
        r": it adds a position bias",
    ),
    "gpt_neo": (
        lambda: GPTNeoForCausalLM(
            GPTNeoConfig(vocab_size=31, hidden_size=16, num_layers=1, num_heads=2, attention_types=[[["global"], 1]])
        ),
        "",
    ),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_an_unsupported_model_is_refused_with_the_reason_and_the_list_of_supported_ones(kind):
    make, reason = UNSUPPORTED[kind]
    lm = make()
    name = type(lm).__name__
    want = rf"model_type {kind} \({name}\) cannot be run in two lanes{reason}.*; supported: "
    with pytest.raises(ModelError, match=want + rf"{', '.join(sorted(FAMILIES))}\."):
        TwoLaneModel(lm, sdpa_backend)
    # A refused model is left as it was.
    assert lm(input_ids=IDS).logits.isfinite().all()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("qwen3_next", "recurrent layers"),
        ("jamba", "recurrent layers"),
        ("falcon_h1", "recurrent layers"),
        ("mamba2", "recurrent layers"),
        ("granitemoehybrid", "recurrent layers"),
        ("gpt_oss", "attention sinks"),
        ("mpt", "position bias"),
        ("gemma3", "reads images"),
        ("llama4_text", "chunked attention"),
    ],
)
def test_a_config_alone_is_refused_with_the_reason(kind, reason):
    with pytest.raises(ModelError, match=rf"model_type {kind} \(here\) cannot be run in two lanes: .*{reason}.*llama"):
        family_of_config(AutoConfig.for_model(kind), "here")


def test_every_family_refused_by_name_exists_and_is_not_supported():
    assert families._REFUSED.keys() <= set(CONFIG_MAPPING)
    assert not families._REFUSED.keys() & FAMILIES.keys()


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_a_router_loss_in_the_objective_is_refused(kind):
    with pytest.raises(ModelError, match=r"output_router_logits.*pruning would bias it.*false"):
        TwoLaneModel(tiny(kind, output_router_logits=True), sdpa_backend)


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text"])
def test_bidirectional_attention_is_refused(kind):
    with pytest.raises(ModelError, match=r"use_bidirectional_attention.*causal"):
        family_of_config(AutoConfig.for_model(kind, use_bidirectional_attention=True))


def test_a_head_with_a_bias_is_refused():
    lm = tiny_llama()
    lm.lm_head = torch.nn.Linear(16, VOCAB, bias=True)
    with pytest.raises(ModelError, match=r"plain nn\.Linear without bias.*bias=True"):
        family_of(lm)


def test_a_head_of_another_class_is_refused():
    class Adapted(torch.nn.Linear):
        pass

    lm = tiny_llama()
    lm.lm_head = Adapted(16, VOCAB, bias=False)
    with pytest.raises(ModelError, match=r"without adapters on the head"):
        family_of(lm)


def scaled_rope(rope_type, num_tokens):
    """Rotary settings whose frequencies change beyond `num_tokens`, and the model's context."""
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0}
    if rope_type == "dynamic":
        return num_tokens, rope
    factors = {"short_factor": [1.5, 1.0, 1.2, 1.0], "long_factor": [4.0, 3.0, 2.0, 5.0]}
    return 2 * num_tokens, {**rope, **factors, "original_max_position_embeddings": num_tokens}


@pytest.mark.parametrize("by_layer_type", [False, True], ids=["llama", "gemma3_text"])
@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rotary_embeddings_that_depend_on_the_longest_row_run_up_to_their_original_context(rope_type, by_layer_type):
    pairs = random_pairs([(4, 5, 3), (2, 1, 6)], VOCAB)
    context, rope = scaled_rope(rope_type, num_tokens=9)
    if by_layer_type:
        plain_rope = {"rope_type": "default", "rope_theta": 1e3}
        lm = tiny("gemma3_text", max_position_embeddings=context, head_dim=8,
                  rope_parameters={"full_attention": rope, "sliding_attention": plain_rope}).float()  # fmt: skip
    else:
        lm = tiny_llama(max_position_embeddings=context, rope_parameters=rope, initializer_range=0.3)
    want = [branch_logps(lm, p.prompt_ids, ids) for p in pairs for ids in (p.chosen_ids, p.rejected_ids)]
    model = TwoLaneModel(copy.deepcopy(lm), sdpa_backend)
    model.check_lengths(pairs)
    live, _ = model(pack_lanes(pairs, full_draws(pairs)))
    torch.testing.assert_close(live, torch.cat(want), rtol=0, atol=2e-6)
    # The first token of a dropped response is scored from its prompt, and comes first.
    frozen = model(pack_lanes(pairs[:1], [keep(d, "rejected", 0.5) for d in full_draws(pairs[:1])]))[1]
    torch.testing.assert_close(frozen, want[0], rtol=0, atol=2e-6)
    longer = random_pairs([(4, 5, 3), (4, 2, 9)], VOCAB)
    with pytest.raises(ModelError, match=rf"pair 1 has 13 tokens; beyond 9 rope_type {rope_type}.*max_length to 9"):
        model.check_lengths(longer)
    # What is refused would indeed differ: the short branch of the long pair's row gets other frequencies.
    own = branch_logps(copy.deepcopy(lm), longer[0].prompt_ids, longer[0].chosen_ids)
    assert (model(pack_lanes(longer, full_draws(longer)))[0][:5] - own).abs().max() > 1e-4


@pytest.mark.parametrize("rope_type", ["linear", "llama3", "yarn"])
def test_fixed_rotary_scalings_run_and_score_as_the_model_itself(rope_type):
    torch.manual_seed(0)
    more = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope_type == "llama3" else {}
    lm = tiny_llama(
        max_position_embeddings=64,
        rope_parameters={
            "rope_type": rope_type,
            "rope_theta": 1e4,
            "factor": 2.0,
            "original_max_position_embeddings": 32,
            **more,
        },
    )
    pairs = random_pairs([(4, 5, 3)], VOCAB)
    layout = pack_lanes(pairs, [keep(d, "chosen", 0.5) for d in full_draws(pairs)])
    plain = copy.deepcopy(lm)
    live, frozen = TwoLaneModel(lm, sdpa_backend)(layout)
    for got, ids in ((live, pairs[0].chosen_ids), (frozen, pairs[0].rejected_ids)):
        torch.testing.assert_close(got, branch_logps(plain, pairs[0].prompt_ids, ids), rtol=0, atol=2e-6)


def test_cross_attention_is_refused():
    lm = tiny_gpt2(add_cross_attention=True)
    with pytest.raises(ModelError, match=r"cross-attention"):
        TwoLaneModel(lm, sdpa_backend)


@pytest.mark.parametrize("config", [{"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False}], ids=str)
def test_attention_scale_of_the_config_is_kept(config):
    lm = tiny_gpt2(**config)
    pairs = random_pairs([(4, 5, 3)], 29)
    layout = pack_lanes(pairs, full_draws(pairs))
    want = [branch_logps(lm, pairs[0].prompt_ids, ids) for ids in (pairs[0].chosen_ids, pairs[0].rejected_ids)]
    live, _ = TwoLaneModel(copy.deepcopy(lm), sdpa_backend)(layout)
    torch.testing.assert_close(live, torch.cat(want), rtol=0, atol=1e-12)
    default, _ = TwoLaneModel(tiny_gpt2(), sdpa_backend)(layout)
    assert (default - live).abs().max() > 1e-3


def test_dropout_of_the_config_does_not_touch_scores_and_stays_in_the_config():
    rates = {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1}
    lm = tiny_gpt2(**rates)
    lm.load_state_dict(POLICY.state_dict())
    lm.train()
    draws = [keep(d, "chosen", 0.5) for d in full_draws(PAIRS)]
    dropped, plain = Run(PAIRS, draws, lm=lm), Run(PAIRS, draws)
    assert dropped.sums == plain.sums
    assert gap(dropped.grad, plain.grad) == 0
    model = TwoLaneModel(lm, sdpa_backend)
    assert {k: getattr(model.lm.config, k) for k in rates} == rates
    assert model.lm.training


def test_a_config_that_two_models_share_is_left_alone():
    first = tiny_gpt2()
    shared = first.config
    before = copy.deepcopy(shared.to_dict())
    second = GPT2LMHeadModel(shared).eval()
    assert second.config is shared
    want = second(input_ids=IDS).logits
    TwoLaneModel(first, sdpa_backend)
    assert shared._attn_implementation == "eager"
    assert shared.to_dict() == before
    assert first.config is not shared
    assert first.config._attn_implementation == ATTENTION_NAME
    torch.testing.assert_close(second(input_ids=IDS).logits, want, rtol=0, atol=0)
    assert second.generate(input_ids=IDS, max_new_tokens=2, do_sample=False).shape == (1, 8)


def test_classes_of_other_models_are_left_alone():
    plain = tiny_gpt2()
    TwoLaneModel(tiny_gpt2(), sdpa_backend)
    assert type(plain.transformer.h[0]).__name__ == "GPT2Block"
    assert type(plain.lm_head) is torch.nn.Linear
    assert plain(input_ids=IDS).logits.isfinite().all()


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_converted_model_neither_generates_nor_runs_by_itself(kind):
    model = TwoLaneModel(tiny(kind), sdpa_backend)
    for after_training_forward in (False, True):
        if after_training_forward:
            pairs = random_pairs(LENGTHS, VOCAB)
            model(pack_lanes(pairs, full_draws(pairs)))
        with pytest.raises(ModelError, match=r"two-lane"):
            model.lm.generate(input_ids=IDS, max_new_tokens=2)
        with pytest.raises(ModelError, match=r"two-lane"):
            model.lm(input_ids=IDS)


def test_state_of_a_forward_is_forgotten_even_if_it_fails():
    def failing(*_):
        raise RuntimeError("kernel")

    layout = pack_lanes(PAIRS, full_draws(PAIRS))
    model = TwoLaneModel(tiny_gpt2(), failing)
    with pytest.raises(RuntimeError, match="kernel"):
        model(layout)
    model.lane_state.backend = sdpa_backend
    first = model(layout)
    assert model.lane_state.frozen_hidden is None
    assert model.lane_state.frozen_rows_KD is None
    for a, b in zip(model(layout), first, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", CONFIGS)
def test_parameter_names_and_sharing_stay_those_of_the_model(kind):
    lm = tiny(kind, tie=True)
    names = [n for n, _ in lm.named_parameters()]
    keys = list(lm.state_dict())
    model = TwoLaneModel(lm, sdpa_backend)
    assert [n for n, _ in model.lm.named_parameters()] == names
    assert list(model.lm.state_dict()) == keys
    assert model.lm.get_output_embeddings().weight is model.lm.get_input_embeddings().weight
    assert isinstance(model.lm, type(lm))


def count_calls(model, layout):
    """Forward calls of every module that holds parameters itself, outside the decoder layers, and of each layer."""
    calls = Counter()
    layers = {m for m in model.modules() if isinstance(m, model.layer_class)}
    inside = {m for layer in layers for m in layer.modules() if m is not layer}
    watched = [m for m in model.modules() if m not in inside and (m in layers or m._parameters)]
    hooks = [m.register_forward_pre_hook(lambda m, _: calls.update([m])) for m in watched]
    live, _ = model(layout)
    live.sum().backward()
    for hook in hooks:
        hook.remove()
    return [calls[m] for m in watched]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("kept", [*KEPT, "dummy"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3_text", "qwen3_moe"])
def test_every_module_with_parameters_runs_once_a_step_whatever_was_drawn(kind, kept, checkpointing):
    """Under ZeRO-3 each call gathers parameters, and ranks that call differently hang."""
    model = TwoLaneModel(tiny(kind), sdpa_backend, gradient_checkpointing=checkpointing)
    pairs = random_pairs(LENGTHS, VOCAB)
    layout = pack_lanes([], []) if kept == "dummy" else pack_lanes(pairs, draws_for(pairs, KEPT[kept], whole=False))
    assert set(count_calls(model, layout)) == {1}
    # Layers, embeddings, final norm and head.
    assert len(count_calls(model, layout)) == 3 + (4 if kind == "gpt2" else 3)


def test_transformers_own_checkpointing_is_switched_off():
    lm = tiny("llama")
    lm.activation_checkpointing_enable()
    model = TwoLaneModel(lm, sdpa_backend)
    assert not any(getattr(m, "gradient_checkpointing", False) for m in model.modules())


def test_recomputing_captures_no_prompt_again(monkeypatch):
    calls = []

    class Watched(LaneCall):
        def __init__(self, *args):
            super().__init__(*args)
            calls.append(self)

    monkeypatch.setattr(two_lane, "LaneCall", Watched)
    pairs = random_pairs([(4, 5, 3)], VOCAB)
    layout = pack_lanes(pairs, [keep(d, "chosen", 0.5) for d in full_draws(pairs)])
    live, _ = TwoLaneModel(tiny("gpt2"), sdpa_backend, gradient_checkpointing=True)(layout)
    live.sum().backward()
    live_calls = [c for c in calls if c.capture_rows_C is not None]
    assert len(live_calls) == 3
    # Kept prompt keys would live as long as the graph.
    assert all(c.prompt_keys is None and c.prompt_values is None for c in live_calls)


def test_checkpointing_recomputes_the_live_lane_alone():
    seen = []

    def watched(query, *rest):
        seen.append((torch.is_grad_enabled(), query.shape[2]))
        return sdpa_backend(query, *rest)

    pairs = random_pairs([(4, 5, 3)], VOCAB)
    layout = pack_lanes(pairs, [keep(d, "chosen", 0.5) for d in full_draws(pairs)])
    model = TwoLaneModel(tiny("gpt2"), watched, gradient_checkpointing=True)
    live, _ = model(layout)
    # Prompt and chosen in one lane, the rejected response in the other.
    assert seen == [(True, 8), (False, 2)] * 3
    seen.clear()
    live.sum().backward()
    assert seen == [(True, 8)] * 3
