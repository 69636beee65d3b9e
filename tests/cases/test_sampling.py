"""What sampling must leave alone, and what it must change: rates of 1, empty samples, identical rows, evaluation."""

import math
from dataclasses import replace

import numpy as np
import pytest

from ds_stochdpo.config import POSITION_SAMPLERS, PREFIX_SAMPLERS
from ds_stochdpo.packing import draw
from tests.cases.job import PRUNED, assert_same, deepspeed_json
from tests.tiny import pair_rows

PAIRS = pair_rows()
SHORT = [{"prompt": f"Q{i}", "chosen": "Y", "rejected": "N"} for i in range(8)]


def drawn(run):
    """Positions of both responses, by optimizer step and pair."""
    return {
        (line["step"], line["pair_id"]): (line["chosen"]["positions"], line["rejected"]["positions"])
        for line in run.lines("draws.jsonl")
    }


def test_rates_of_one_are_the_run_without_sampling(jobs):
    """The samplers run and keep everything: the draws are those that no sampler made, the run is the same run."""
    config = jobs.config("wide", PAIRS)
    pairs = jobs.pairs(config)
    for position, prefix in zip(POSITION_SAMPLERS, PREFIX_SAMPLERS, strict=True):
        sampled = draw(pairs, replace(config, position_sampler=position, prefix_sampler=prefix))
        for pair, made in zip(pairs, sampled, strict=True):
            for branch, length in ((made.chosen, len(pair.chosen_ids)), (made.rejected, len(pair.rejected_ids))):
                assert branch.positions.tolist() == list(range(length))
                assert set(branch.weights) == {1.0}
            assert (made.kept, made.kept_prob) == ("both", 1.0)
    settings = {"label_smoothing": 0.1, "log_draws": True, "reference_model": "other llama"}
    run = jobs.run("wide", PAIRS, **settings)
    other = jobs.run("wide", PAIRS, position_sampler="bernoulli", prefix_sampler="floor", **settings)
    assert_same(run, other, metrics=0, weights=0)
    assert list(drawn(run)) == list(drawn(other))


def test_recomputing_activations_draws_nothing_again(jobs):
    plan = {**PRUNED, "position_sampler": "bernoulli", "reference_model": "other llama"}
    assert_same(jobs.run("wide", PAIRS, gradient_checkpointing=True, **plan), jobs.run("wide", PAIRS, **plan))


def test_a_step_that_samples_nothing_is_finite_and_contributes_nothing(jobs):
    run = jobs.run("llama", SHORT, deepspeed_json(0), per_device_train_batch_size=8, position_keep=0.01, max_steps=200)
    assert len(run.steps) == 200
    assert all(math.isfinite(value) for step in run.steps for value in step.values())
    empty = [step for step in run.steps if step["tokens/scored"] == 0]
    assert 20 < len(empty) < 200
    for step in empty:
        assert step["loss"] == pytest.approx(math.log(2), abs=1e-12)
        assert (step["grad_norm"], step["rewards/margins"], step["logps/chosen"]) == (0, 0, 0)


def test_designs_of_fixed_size_score_one_position_with_its_true_probability(jobs):
    """`fixed` and `stratified` never come out empty: of 2 tokens at rate 0.01 one is scored and weighs 2."""
    config = jobs.config("llama", SHORT, position_keep=0.01)
    for sampler in ("fixed", "stratified"):
        for made in draw(jobs.pairs(config), replace(config, position_sampler=sampler)):
            assert (made.chosen.weights.tolist(), made.rejected.weights.tolist()) == ([2.0], [2.0])


@pytest.mark.parametrize("sampler", POSITION_SAMPLERS)
def test_identical_rows_are_sampled_apart_and_alike_in_a_second_run(jobs, sampler):
    rows = [{"prompt": "Name one.", "chosen": "It is one." + " Yes" * 5, "rejected": "No idea" + "!" * 20}] * 24
    settings = {"position_keep": 0.5, "position_sampler": sampler, "num_train_epochs": 2, "log_draws": True}
    settings |= {"reference": "none", "per_device_train_batch_size": 8}
    first, second = (drawn(jobs.run("llama", rows, deepspeed_json(0), **settings)) for _ in range(2))
    assert first == second
    by_epoch = [{pair: made for (step, pair), made in first.items() if (step > 3) == later} for later in (False, True)]
    assert [len(epoch) for epoch in by_epoch] == [24, 24]
    # A systematic sample is one of two, whatever the length.
    least = 2 if sampler == "systematic" else 20
    assert len({str(made) for made in by_epoch[0].values()}) >= least
    assert sum(by_epoch[0][pair] != by_epoch[1][pair] for pair in range(24)) >= 6


def test_evaluation_samples_nothing(jobs):
    """At rates of 0.3, twice, and with a batch that does not divide the pairs."""
    plan = {"position_keep": 0.3, "prefix_keep": 0.3, "branch": "single", "branch_prob": 0.3}
    engine, pairs = jobs.engine("wide", PAIRS[:11], deepspeed_json(0), reference_model="other llama", **plan)
    first, second = engine.evaluate(pairs), engine.evaluate(pairs)
    assert first == second
    exact, same_pairs = jobs.engine("wide", PAIRS[:11], deepspeed_json(0), reference_model="other llama",
                                    per_device_eval_batch_size=3)  # fmt: skip
    assert exact.evaluate(same_pairs) == pytest.approx(first, rel=1e-6, abs=1e-6)
    # All 11 are in it: each pair alone, averaged.
    alone = [exact.evaluate([pair])["rewards/margins"] for pair in same_pairs]
    assert first["rewards/margins"] == pytest.approx(np.mean(alone), abs=1e-6)
