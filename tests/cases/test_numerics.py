"""The numbers of a run: step 0, dropout, beta, smoothing, accumulation, impossible tokens, precision."""

import json
import logging
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ds_stochdpo import StochDPOError, add_reference
from ds_stochdpo.packing import draw, pack_lanes
from ds_stochdpo.pruning import full_draw
from tests.cases.job import PRUNED, assert_same, deepspeed_json
from tests.oracle import branch_logps
from tests.tiny import pair_rows

PAIRS = pair_rows()


def full(pairs):
    return [full_draw(len(p.chosen_ids), len(p.rejected_ids)) for p in pairs]


@pytest.mark.parametrize(("per_step", "share_prompt"), [(1, True), (4, False)], ids=["1 shared", "4 apart"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_the_margin_before_the_first_update_is_zero(jobs, bf16, per_step, share_prompt):
    """Whatever is sampled: the reference is cached a token, so both models are summed over the same positions."""
    settings = {"learning_rate": 0.0, "per_device_train_batch_size": per_step, "share_prompt": share_prompt}
    engine, pairs = jobs.engine("llama", PAIRS[:12], bf16=bf16, **settings)
    for plan in ({}, PRUNED):
        draws = draw(pairs, replace(engine.config, **plan))
        metrics = engine.train_step(pairs, draws)
        assert abs(metrics["rewards/margins"]) / 0.1 <= (1e-3 if bf16 else 1e-6)
        assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-4 if bf16 else 1e-6)
        assert metrics["grad_norm"] > 0.1


def test_an_online_reference_runs_the_same_rows_and_gives_a_margin_of_exactly_zero(jobs):
    for bf16 in (False, True):
        engine, pairs = jobs.engine("wide", PAIRS, bf16=bf16, reference="online", **PRUNED)
        assert engine.train_step(pairs)["rewards/margins"] == 0.0


def test_dropout_of_the_config_is_off_in_training_and_stays_in_the_config(jobs):
    without, trained = (jobs.run(model, PAIRS) for model in ("gpt2", "gpt2 with dropout"))
    assert trained.steps[0]["rewards/margins"] == pytest.approx(0.0, abs=1e-7)
    assert_same(trained, without, metrics=0, weights=0)
    exported = json.loads((trained.folder / "config.json").read_text())
    assert {exported[f"{place}_pdrop"] for place in ("resid", "attn", "embd")} == {0.1}


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.01])
def test_the_gradient_at_margin_zero_is_linear_in_beta(jobs, max_grad_norm):
    """4 would be beta twice, 1 a norm that is logged after clipping."""
    norms = []
    for beta in (0.1, 0.2):
        engine, pairs = jobs.engine("llama", PAIRS, deepspeed_json(0), beta=beta, max_grad_norm=max_grad_norm)
        norms.append(engine.train_step(pairs)["grad_norm"])
    assert norms[1] / norms[0] == pytest.approx(2.0, abs=1e-3)


SMOOTHED = [(0.0, 2.0, 0.126928), (0.0, -3.0, 3.048587), (0.1, 2.0, 0.326928), (0.1, -3.0, 2.748587),
            (0.5, 2.0, 1.126928), (0.5, -3.0, 1.548587)]  # fmt: skip


@pytest.mark.filterwarnings("ignore:label_smoothing is 0.5")
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_smoothing_is_the_same_in_training_pruned_training_and_evaluation(jobs, smoothing):
    """The reference is set such that beta * margin is 2 or -3, spread evenly over the tokens of the chosen response."""
    engine, (pair,) = jobs.engine("llama", PAIRS[3:4], deepspeed_json(0), learning_rate=0.0, label_smoothing=smoothing)
    assert pair.shared_start == 0
    # A sample of fixed size sums an even spread exactly, whatever it picks.
    pruned = replace(engine.config, position_keep=0.5, position_sampler="fixed", branch="single")
    for margin, expected in [(m, loss) for s, m, loss in SMOOTHED if s == smoothing]:
        even = np.float32(margin / engine.config.beta / len(pair.chosen_ids))
        shifted = [replace(pair, chosen_ref_logps=pair.chosen_ref_logps - even)]
        draws = draw(shifted, pruned)
        assert 0 < len(draws[0].chosen.positions) < len(pair.chosen_ids)
        losses = [engine.evaluate(shifted), engine.train_step(shifted), engine.train_step(shifted, draws)]
        assert [m["loss"] for m in losses] == pytest.approx([expected] * 3, abs=5e-6)


@pytest.mark.parametrize(("per_step", "share_prompt"), [(1, True), (4, False)], ids=["1 shared", "4 apart"])
def test_rewards_are_beta_times_sums_over_the_response_tokens(jobs, per_step, share_prompt):
    rows = [{"prompt": "Name one.", "chosen": "Yes", "rejected": "No idea" + "!" * 32}, *PAIRS[:3]]
    settings = {"per_device_train_batch_size": per_step, "share_prompt": share_prompt, "beta": 0.3}
    engine, pairs = jobs.engine("wide", rows, reference_model="other llama", **settings)
    assert (len(pairs[0].chosen_ids), len(pairs[0].rejected_ids)) == (3, 40)
    metrics = engine.train_step(pairs)
    models = [AutoModelForCausalLM.from_pretrained(jobs.folder / name).eval() for name in ("wide", "other llama")]
    rewards = {}
    for side in ("chosen", "rejected"):
        with torch.no_grad():
            policy, reference = (
                np.mean([float(branch_logps(lm, p.prompt_ids, getattr(p, f"{side}_ids")).sum()) for p in pairs])
                for lm in models
            )
        rewards[side] = 0.3 * (policy - reference)
        assert metrics[f"logps/{side}"] == pytest.approx(policy, abs=1e-4)
        assert metrics[f"rewards/{side}"] == pytest.approx(rewards[side], abs=1e-4)
    assert metrics["rewards/margins"] == pytest.approx(rewards["chosen"] - rewards["rejected"], abs=1e-4)


@pytest.mark.parametrize("words", [1, 50])
def test_only_response_tokens_are_scored_in_both_branches(jobs, words):
    """However long the prompt is; 50 words are more tokens than both responses."""
    rows = [{"prompt": "Name one." + " Green" * words, "chosen": "Pear pie.", "rejected": "No."}]
    engine, pairs = jobs.engine("llama", rows, deepspeed_json(0), share_response_start=False)
    layout = pack_lanes(pairs, full(pairs), share_response_start=False)
    tokenizer_targets = layout.live_rows.target_K.tolist()
    assert tokenizer_targets == [*pairs[0].chosen_ids, *pairs[0].rejected_ids]
    assert layout.live_rows.slot_K.tolist() == [0] * len(pairs[0].chosen_ids) + [1] * len(pairs[0].rejected_ids)
    assert engine.train_step(pairs)["tokens/scored"] == len(tokenizer_targets) < 20 + 10 * words


def test_a_first_token_is_scored_from_its_own_prompt(jobs):
    """Neither from the last position of the lane, nor from the row before it."""
    rows = [{"prompt": "Name one.", "chosen": "Yes", "rejected": "No"}, PAIRS[1]]
    engine, pairs = jobs.engine("wide", rows, reference="none")
    # Without their end tokens the responses of the first row are single tokens.
    short = replace(pairs[0], chosen_ids=pairs[0].chosen_ids[:1], rejected_ids=pairs[0].rejected_ids[:1])
    lm = AutoModelForCausalLM.from_pretrained(jobs.folder / "wide").eval()
    for batch in ([short], [short, pairs[1]], [pairs[1], short]):
        for pair, scores in zip(batch, engine.score(batch), strict=True):
            with torch.no_grad():
                logits = lm(input_ids=torch.from_numpy(pair.prompt_ids)[None]).logits[0, -1].log_softmax(-1)
            assert scores.chosen_logps[0] == pytest.approx(float(logits[pair.chosen_ids[0]]), abs=1e-5)
            assert scores.rejected_logps[0] == pytest.approx(float(logits[pair.rejected_ids[0]]), abs=1e-5)


@pytest.mark.parametrize("plan", [{}, PRUNED], ids=["exact", "pruned"])
def test_accumulating_micro_batches_changes_no_step(jobs, plan):
    settings = {"reference_model": "other llama", **plan}
    at_once = jobs.run("wide", PAIRS, **settings)
    in_four = jobs.run("wide", PAIRS, per_device_train_batch_size=1, gradient_accumulation_steps=4, **settings)
    assert len(at_once.steps) == 6
    assert_same(in_four, at_once)


def test_what_is_called_chosen_is_the_chosen_response(jobs):
    rows = [{"prompt": "Which?", "chosen": "This one", "rejected": "That other"}]
    run = jobs.run("llama", rows, max_steps=30, learning_rate=1e-2)
    first, last = run.steps[0], run.steps[-1]
    assert last["rewards/chosen"] > 0 > last["rewards/rejected"]
    assert last["rewards/margins"] == pytest.approx(last["rewards/chosen"] - last["rewards/rejected"])
    (pair,) = jobs.pairs(jobs.config("llama", rows))
    with torch.no_grad():
        lm = AutoModelForCausalLM.from_pretrained(jobs.folder / "llama").eval()
        chosen = float(branch_logps(lm, pair.prompt_ids, pair.chosen_ids).sum())
    assert first["logps/chosen"] == pytest.approx(chosen, abs=1e-4)
    assert last["logps/chosen"] > first["logps/chosen"]


def test_bf16_keeps_fp32_master_weights_so_that_small_steps_add_up(jobs, caplog):
    caplog.set_level(logging.WARNING)
    run = jobs.run("llama", PAIRS, bf16=True, learning_rate=5e-7, max_steps=50, per_device_train_batch_size=8)
    # Rounding moves a single margin by about 1e-5.
    assert np.mean([step["rewards/margins"] for step in run.steps[-10:]]) > 1e-4
    assert "master weights" not in caplog.text
    without = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    jobs.run("llama", PAIRS, deepspeed_json(**without), max_steps=1)
    assert sum("no fp32 master weights" in record.getMessage() for record in caplog.records) == 1


def impossible(engine, token):
    """A head that gives one token the log-prob -inf wherever it is scored."""

    def spoil(_, inputs, outputs):
        return tuple(
            torch.where(targets == token, -torch.inf, logp) for targets, logp in zip(inputs[1::2], outputs, strict=True)
        )

    return engine.module.lm.get_output_embeddings().register_forward_hook(spoil)


def test_an_impossible_token_is_an_error_that_names_its_row(jobs):
    """Before a step is taken: of 6 rows the fourth has it."""
    rows = [*PAIRS[:3], {"prompt": "Name one.", "chosen": "Z", "rejected": "No"}, *PAIRS[3:5]]
    engine, pairs = jobs.engine("llama", rows, deepspeed_json(0), reference="none")
    hook = impossible(engine, pairs[3].chosen_ids[0])
    with pytest.raises(StochDPOError, match=r"reference gives .* not finite for \['.*rows\d+.jsonl:4'\]"):
        add_reference(engine, pairs)
    prompt = replace(pairs[3], prompt_ids=pairs[3].chosen_ids[:1], chosen_ids=pairs[0].chosen_ids)
    assert math.isfinite(engine.evaluate([prompt])["loss"])
    hook.remove()
    assert math.isfinite(engine.train_step(pairs)["loss"])
