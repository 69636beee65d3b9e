"""What changes nothing on the whole path: truncation, shared starts, packing, memory settings."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from ds_stochdpo.config import PruningPlan
from ds_stochdpo.data.pair import PreferencePair
from ds_stochdpo.model import ScoringOptions
from ds_stochdpo.pruning import draw_pairs
from ds_stochdpo.pruning.draws import BranchDraw, PairDraw
from tests.model.gpt2_float64 import (
    BROKEN,
    EXACT,
    POLICY,
    VOCAB,
    Run,
    autograd,
    by_token,
    full_draws,
    gap,
    keep,
    mean,
    scored_pairs,
)

PAIRS = scored_pairs([(4, 5, 3), (2, 3, 6), (5, 4, 4)])
ONE = scored_pairs([(3, 4, 3)], seed=3)


@pytest.mark.parametrize("kept", ["both", "chosen", "rejected"])
@pytest.mark.parametrize("share_prompt", [True, False], ids=["shared", "apart"])
def test_a_truncated_response_scores_its_prefix_as_the_full_one(kept, share_prompt):
    """Causality: what is not run cannot matter."""
    full = keep(full_draws(ONE)[0], kept, 1.0)
    whole = Run(ONE, [full], share_prompt=share_prompt)
    for tokens in (1, 2, 3):
        cut = [BranchDraw(tokens, np.arange(tokens), np.ones(tokens)) for _ in range(2)]
        run = Run(ONE, [replace(full, chosen=cut[0], rejected=cut[1])], share_prompt=share_prompt)
        assert run.layout.counts.executed <= whole.layout.counts.executed
        for (slot, position), logp in by_token(run).items():
            assert logp == pytest.approx(by_token(whole)[slot, position], abs=EXACT)
        assert set(by_token(run)) == {(slot, t) for slot in (0, 1) for t in range(tokens)}


@pytest.mark.parametrize("kept", ["both", "chosen", "rejected"])
def test_leaving_out_the_shared_start_changes_neither_loss_nor_gradient(kept):
    pairs = scored_pairs([(3, 6, 5), (2, 4, 7)], shared=3)
    assert [p.shared_start for p in pairs] == [3, 3]
    draws = [keep(d, kept, 1.0) for d in full_draws(pairs)]
    removed, whole = (Run(pairs, draws, share_response_start=s) for s in (True, False))
    assert removed.sums == pytest.approx(whole.sums, abs=1e-11)
    assert removed.layout.counts.executed < whole.layout.counts.executed
    if kept == "both":
        assert gap(removed.grad, whole.grad) < EXACT
    else:
        # With one branch the shared tokens are pure noise: the outcome changes, its mean does not.
        assert gap(removed.grad, whole.grad) > BROKEN


def test_mean_over_branches_is_the_same_with_and_without_the_shared_start():
    pairs = scored_pairs([(3, 6, 5)], shared=3)
    want = autograd(pairs, full_draws(pairs))[2]
    for removes in (True, False):
        runs = [
            (0.5, Run(pairs, [keep(full_draws(pairs)[0], k, 0.5)], share_response_start=removes).grad)
            for k in ("chosen", "rejected")
        ]
        assert gap(mean(runs), want) < EXACT


class OneTooMany(PreferencePair):
    """A pair that takes one differing token for shared."""

    @property
    def shared_start(self):
        return super().shared_start + 1


def test_a_shared_start_that_is_one_too_long_is_seen():
    pairs = scored_pairs([(3, 6, 5)], shared=3)
    wrong = [OneTooMany(**vars(p)) for p in pairs]
    draws = full_draws(pairs)
    got, want = Run(wrong, draws), Run(pairs, draws)
    assert abs(got.loss - want.loss) > BROKEN
    assert gap(got.grad, want.grad) > BROKEN


SETTINGS = {
    "checkpointing": {"checkpointing": True},
    "kept softmax": {"options": ScoringOptions(chunk_rows=3, recompute=False)},
    "one chunk": {"options": ScoringOptions(chunk_rows=1000)},
    "one row": {"options": ScoringOptions(chunk_rows=1)},
    "prompts apart": {"share_prompt": False},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_memory_settings_change_nothing(settings):
    plan = PruningPlan(0.6, "systematic", 0.7, "floor", branch="single", branch_prob=0.4)
    draws = draw_pairs(plan, seed=1, epoch=0, step=0, pair_ids=range(3),
                       chosen_lengths=[5, 3, 4], rejected_lengths=[3, 6, 4])  # fmt: skip
    assert {d.kept for d in draws} == {"chosen", "rejected"}
    plain, other = Run(PAIRS, draws), Run(PAIRS, draws, **settings)
    assert gap(other.grad, plain.grad) < EXACT
    assert other.sums["loss"] == pytest.approx(plain.sums["loss"], abs=EXACT)


def test_cutting_a_step_into_micro_batches_adds_up_to_the_same_gradient():
    draws = [keep(d, k, 0.5) for d, k in zip(full_draws(PAIRS), ("chosen", "rejected", "chosen"), strict=True)]
    whole = Run(PAIRS, draws)
    parts = [Run([p], [d], num_pairs=3) for p, d in zip(PAIRS, draws, strict=True)]
    assert gap(sum(r.grad for r in parts), whole.grad) < EXACT
    assert sum(r.sums["loss"] for r in parts) == pytest.approx(whole.sums["loss"], abs=EXACT)
    # Dividing by the pairs at hand instead of those of the step.
    assert gap(sum(Run([p], [d]).grad for p, d in zip(PAIRS, draws, strict=True)), whole.grad) > BROKEN


def test_a_dummy_reaches_every_parameter_with_zero():
    run = Run([], [], num_pairs=4)
    assert run.grad.abs().max() == 0
    assert run.sums["loss"] == 0


def test_empty_samples_are_an_outcome_like_any_other():
    nothing = BranchDraw(3, np.zeros(0, np.int64), np.zeros(0))
    run = Run(ONE, [PairDraw(nothing, nothing)])
    assert run.loss == pytest.approx(math.log(2), abs=EXACT)
    assert run.grad.abs().max() == 0


def test_two_copies_of_a_pair_score_alike_and_a_second_row_is_not_scored_from_the_first():
    copies = [replace(PAIRS[0], pair_id=i) for i in range(2)]
    tokens = by_token(Run(copies, full_draws(copies)))
    for (slot, position), logp in tokens.items():
        assert logp == pytest.approx(tokens[slot % 3, position], abs=EXACT)
    # A neighbour changes nothing either.
    beside = by_token(Run([PAIRS[1], PAIRS[0]], full_draws([PAIRS[1], PAIRS[0]])))
    for (slot, position), logp in by_token(Run([PAIRS[0]], full_draws(PAIRS[:1]))).items():
        assert logp == pytest.approx(beside[slot + 3, position], abs=EXACT)


def test_responses_of_one_token_are_scored_from_the_prompt():
    pairs = scored_pairs([(3, 1, 1), (1, 1, 2)], seed=8)
    run = Run(pairs, full_draws(pairs))
    for index, pair in enumerate(pairs):
        with torch.no_grad():
            logits = POLICY(torch.from_numpy(pair.prompt_ids)[None]).logits[0, -1]
        by_hand = logits.log_softmax(-1)[pair.chosen_ids[0]].item()
        assert by_token(run)[3 * index, 0] == pytest.approx(by_hand, abs=EXACT)
    assert VOCAB > max(p.prompt_ids.max() for p in pairs)
