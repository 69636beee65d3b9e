"""The whole path on a float64 GPT-2, packing to surrogate, against plain autograd.

Each identity holds to 1e-12; its twin breaks one thing on purpose and must miss by more than 1e-3.
"""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from ds_stochdpo.config import PruningPlan, StochDPOConfig
from ds_stochdpo.pruning import draw_pairs, jensen_gap_bound
from ds_stochdpo.pruning.branches import antithetic_couples, madow_sample
from ds_stochdpo.pruning.draws import BranchDraw, PairDraw
from tests.model.gpt2_float64 import (
    BETA,
    BROKEN,
    EXACT,
    POLICY,
    REFERENCE,
    Run,
    autograd,
    full_draws,
    gap,
    keep,
    losses,
    mean,
    outcomes,
    reweighted,
    scored_pairs,
    tiny_gpt2,
)
from tests.oracle import branch_logps, padded_dpo_loss

LENGTHS = [(4, 5, 3), (2, 3, 6), (5, 4, 4)]
PAIRS = scored_pairs(LENGTHS)
ONE = scored_pairs([(3, 4, 3)], seed=3)
LOSSES = [("sigmoid", 0.0), ("sigmoid", 0.2), ("robust", 0.2), ("hinge", 0.0)]


@pytest.mark.parametrize("packing", [{}, {"share_prompt": False}, {"share_response_start": False}], ids=str)
@pytest.mark.parametrize(("loss_type", "smoothing"), LOSSES)
def test_surrogate_gradient_is_the_gradient_of_the_loss(loss_type, smoothing, packing):
    pairs = scored_pairs(LENGTHS, shared=1)
    config = StochDPOConfig(beta=BETA, loss_type=loss_type, label_smoothing=smoothing)
    got = Run(pairs, full_draws(pairs), config=config, **packing)
    value, margins, want = autograd(pairs, full_draws(pairs), loss=lambda m: losses(m, loss_type, smoothing))
    assert gap(got.grad, want) < EXACT
    assert got.loss == pytest.approx(value, abs=EXACT)
    assert got.margin == pytest.approx(margins.sum().item(), abs=EXACT)
    # Each pair has its own slope: one slope for all would be seen.
    assert gap(got.grad * 1.01, want) > BROKEN


def test_rates_of_one_are_plain_padded_dpo():
    plan = PruningPlan()
    lengths = {"pair_ids": range(3), "chosen_lengths": [5, 3, 4], "rejected_lengths": [3, 6, 4]}
    draws = draw_pairs(plan, seed=0, epoch=0, step=0, **lengths)
    got = Run(PAIRS, draws)
    lm = tiny_gpt2()
    loss = padded_dpo_loss(lm, PAIRS, beta=BETA)
    loss.backward()
    want = torch.cat([p.grad.flatten() for p in lm.parameters()])
    assert gap(got.grad, want) < EXACT
    assert got.loss == pytest.approx(loss.item(), abs=EXACT)
    for settings in (
        {"position_sampler": "bernoulli"},
        {"position_sampler": "fixed"},
        {"position_sampler": "stratified"},
        {"prefix_sampler": "floor"},
        {"prefix_sampler": "uniform"},
        {"prefix_sampler": "geometric"},
        {"prefix_min_survival": 1.0},
        {"prefix_weighting": "none"},
    ):
        other = Run(PAIRS, draw_pairs(replace(plan, **settings), seed=5, epoch=1, step=2, **lengths))
        assert torch.equal(other.grad, got.grad)
        assert other.sums == got.sums


def test_a_padded_forward_that_starts_one_token_late_is_seen():
    """Twin of the oracle: scoring from the row before the right one is far off."""

    def shift(layout):
        rows = replace(layout.live_rows, row_K=(layout.live_rows.row_K - 1).clamp(min=0))
        return replace(layout, live_rows=rows)

    want = autograd(PAIRS, full_draws(PAIRS))[2]
    assert gap(Run(PAIRS, full_draws(PAIRS), layout_edit=shift).grad, want) > BROKEN

    def shift_first(layout):
        # Only the first token of each response is taken from the wrong row.
        rows = layout.live_rows
        return replace(layout, live_rows=replace(rows, row_K=rows.row_K - (rows.position_K == 0).long()))

    assert gap(Run(PAIRS, full_draws(PAIRS), layout_edit=shift_first).grad, want) > BROKEN


def single_branch(pairs, draws, kept, probs, weighted=True):
    """Gradient with one branch a pair; `probs` are those of chosen."""
    drawn = [
        keep(d, k, (p if k == "chosen" else 1 - p) if weighted else 1.0)
        for d, k, p in zip(draws, kept, probs, strict=True)
    ]
    return Run(pairs, drawn)


def branch_outcomes(probs):
    """(probability, kept) of three independent coins."""
    for kept in itertools.product(("chosen", "rejected"), repeat=len(probs)):
        yield math.prod(p if k == "chosen" else 1 - p for k, p in zip(kept, probs, strict=True)), kept


@pytest.mark.parametrize("probs", [(0.5, 0.5, 0.5), (0.3, 0.5, 0.8)], ids=str)
def test_mean_over_all_branch_outcomes_is_the_full_gradient(probs):
    draws = full_draws(PAIRS)
    want_loss, _, want = autograd(PAIRS, draws)
    runs = [(p, single_branch(PAIRS, draws, kept, probs)) for p, kept in branch_outcomes(probs)]
    assert gap(mean((p, r.grad) for p, r in runs), want) < EXACT
    # The loss is that of both branches whatever was kept.
    assert [r.loss for _, r in runs] == pytest.approx([want_loss] * 8, abs=EXACT)
    # One outcome alone is not the gradient.
    assert min(gap(r.grad, want) for _, r in runs) > 0.01
    without = mean((p, single_branch(PAIRS, draws, k, probs, weighted=False).grad) for p, k in branch_outcomes(probs))
    assert gap(without, want) > BROKEN
    by_kept_count = mean(
        (p, r.grad * 3 / max(1, sum(k == "chosen" for k in kept)))
        for (p, r), (_, kept) in zip(runs, branch_outcomes(probs), strict=True)
    )
    assert gap(by_kept_count, want) > BROKEN


def test_swapped_probabilities_are_seen():
    probs, draws = (0.3, 0.5, 0.8), full_draws(PAIRS)
    swapped = [1 - p for p in probs]
    got = mean((p, single_branch(PAIRS, draws, kept, swapped).grad) for p, kept in branch_outcomes(probs))
    assert gap(got, autograd(PAIRS, draws)[2]) > BROKEN


def balanced_outcomes(probs):
    """(probability, kept) of every balanced draw: couples at one half, else Madow's systematic sample."""
    if set(probs) == {0.5}:
        for coins in itertools.product((0.25, 0.75), repeat=2):
            yield 0.25, antithetic_couples(3, np.array(coins))
    else:
        edges = sorted({0.0, 1.0, *(1 - c % 1 for c in np.cumsum(probs) if c % 1)})
        for a, b in itertools.pairwise(edges):
            yield b - a, madow_sample(np.array(probs), (a + b) / 2)


@pytest.mark.parametrize("probs", [(0.5, 0.5, 0.5), (0.3, 0.5, 0.9)], ids=str)
def test_mean_over_all_balanced_draws_is_the_full_gradient(probs):
    draws = full_draws(PAIRS)
    want = autograd(PAIRS, draws)[2]
    kept = [(p, ["chosen" if c else "rejected" for c in row]) for p, row in balanced_outcomes(probs)]
    assert len({tuple(k) for _, k in kept}) < 8, "a balanced draw leaves outcomes out"
    assert gap(mean((p, single_branch(PAIRS, draws, k, probs).grad) for p, k in kept), want) < EXACT
    assert gap(mean((p, single_branch(PAIRS, draws, k, probs, weighted=False).grad) for p, k in kept), want) > BROKEN


@pytest.mark.parametrize("prob", [0.5, 0.3])
def test_drawn_branches_carry_the_probability_that_the_gradient_needs(prob):
    """`draw_pairs` itself, over seeds: its weights on what it kept give the full gradient of one pair."""
    plan = PruningPlan(branch="single", branch_prob=prob, branch_balance="iid")
    lengths = {"pair_ids": [0], "chosen_lengths": [4], "rejected_lengths": [3]}
    seen = {}
    for seed in range(20):
        (draw,) = draw_pairs(plan, seed=seed, epoch=0, step=0, **lengths)
        seen[draw.kept] = draw
    assert set(seen) == {"chosen", "rejected"}
    got = mean((d.kept_prob, Run(ONE, [d]).grad) for d in seen.values())
    assert gap(got, autograd(ONE, full_draws(ONE))[2]) < EXACT


PLANS = {
    "masks": PruningPlan(position_keep=0.4, position_sampler="bernoulli"),
    "two_point": PruningPlan(prefix_keep=0.6, prefix_sampler="two_point", prefix_min_survival=0.3),
    "floor": PruningPlan(prefix_keep=0.7, prefix_sampler="floor", prefix_min_survival=0.2),
    "both": PruningPlan(0.5, "bernoulli", 0.6, "uniform"),
}
# Masks and prefixes together have many outcomes, so that case has shorter responses.
LENGTHS_OF = {"masks": (3, 4, 3), "two_point": (3, 4, 3), "floor": (3, 4, 3), "both": (2, 3, 3)}


def case(name, reference=REFERENCE):
    """(plan, one pair) of a sampling case."""
    return PLANS[name], scored_pairs([LENGTHS_OF[name]], seed=3, reference=reference)


def ratios(run):
    """(chosen, rejected) sampled log-ratios of a run of one pair."""
    return np.array([run.sums["rewards/chosen"], run.sums["rewards/rejected"]]) / BETA


def full_ratios(pair):
    with torch.no_grad():
        return np.array(
            [
                branch_logps(POLICY, pair.prompt_ids, ids).sum().item() - ref.sum()
                for ids, ref in (
                    (pair.chosen_ids, pair.chosen_ref_logps),
                    (pair.rejected_ids, pair.rejected_ref_logps),
                )
            ]
        )


@pytest.mark.parametrize("name", PLANS)
def test_mean_of_the_sampled_log_ratios_is_the_full_one(name):
    plan, pairs = case(name)
    want = full_ratios(pairs[0])
    drawn = list(outcomes(plan, pairs[0]))

    def mean_with(weights):
        draws = [(p, d if weights is None else reweighted(d, weights)) for p, d in drawn]
        return mean((p, ratios(Run(pairs, [d]))) for p, d in draws)

    np.testing.assert_allclose(mean_with(None), want, rtol=0, atol=EXACT)
    assert abs(mean_with(lambda b: np.ones(len(b.positions))) - want).max() > BROKEN
    if plan.position_keep < 1:
        # Dividing by the kept count instead of the design's rate.
        by_count = mean_with(lambda b: np.full(len(b.positions), 4 / max(1, len(b.positions))))
        assert abs(by_count - want).max() > BROKEN
    if plan.prefix_keep < 1:
        by_prefix = mean_with(lambda b: np.full(len(b.positions), 4 / b.prefix_tokens))
        assert abs(by_prefix - want).max() > BROKEN


@pytest.mark.parametrize("name", ["masks", "both"])
def test_composite_is_unbiased_given_each_sample_and_over_everything(name):
    plan, pairs = case(name)
    prob_chosen = 0.3
    total, objective, gradient_of_objective = 0.0, 0.0, 0.0
    for prob, draw in outcomes(plan, pairs[0]):
        value, _, want = autograd(pairs, [draw])
        sides = [
            (p, Run(pairs, [keep(draw, kept, p)]))
            for kept, p in (("chosen", prob_chosen), ("rejected", 1 - prob_chosen))
        ]
        got = mean((p, run.grad) for p, run in sides)
        assert (got - want).norm() < EXACT
        assert [run.loss for _, run in sides] == pytest.approx([value] * 2, abs=EXACT)
        total = total + prob * got
        objective += prob * value
        gradient_of_objective = gradient_of_objective + prob * want
    assert gap(total, gradient_of_objective) < EXACT
    full_value, _, full_gradient = autograd(pairs, full_draws(pairs))
    # What is not unbiased: neither the loss nor its gradient is that of full DPO.
    assert objective - full_value > 1e-9
    assert gap(total, full_gradient) > BROKEN


@pytest.mark.parametrize("name", PLANS)
def test_sampled_loss_is_an_upper_bound_within_the_jensen_gap(name):
    plan, pairs = case(name)
    runs = [(p, Run(pairs, [d])) for p, d in outcomes(plan, pairs[0])]
    margin = mean((p, r.margin) for p, r in runs)
    variance = mean((p, (r.margin - margin) ** 2) for p, r in runs)
    full, (full_margin,), _ = autograd(pairs, full_draws(pairs))
    assert margin == pytest.approx(full_margin.item(), abs=EXACT)
    excess = mean((p, r.loss) for p, r in runs) - full
    assert 0 < excess <= jensen_gap_bound(BETA, variance)
    # The bound is no empty one: a hundredth of the variance would not do.
    assert excess > jensen_gap_bound(BETA, variance / 100)


@pytest.mark.parametrize("kept", ["both", "chosen", "rejected"])
@pytest.mark.parametrize("name", PLANS)
def test_at_the_reference_every_sample_gives_margin_zero_and_the_exact_slope(name, kept):
    plan, pairs = case(name, reference=POLICY)
    for _, draw in outcomes(plan, pairs[0]):
        drawn = keep(draw, kept, 1.0 if kept == "both" else 0.5)
        run = Run(pairs, [drawn])
        assert run.margin == pytest.approx(0, abs=EXACT)
        assert run.loss == pytest.approx(math.log(2), abs=EXACT)
        # -beta / 2 times the gradient of what was kept, over its probability.
        lm = tiny_gpt2()
        score = 0.0
        for sign, branch in ((1, "chosen"), (-1, "rejected")):
            if kept in ("both", branch):
                part = getattr(drawn, branch)
                logps = branch_logps(lm, pairs[0].prompt_ids, getattr(pairs[0], f"{branch}_ids"))
                score = score + sign * (logps[part.positions] * torch.from_numpy(part.weights)).sum()
        (-BETA / 2 / drawn.kept_prob * score).backward()
        want = torch.cat([p.grad.flatten() for p in lm.parameters()])
        assert (run.grad - want).norm() < EXACT


def test_at_the_reference_separate_masks_for_policy_and_reference_are_seen():
    def other_rows(layout):
        # The reference of the neighbouring position, as a mask of its own would take.
        return replace(layout, live_rows=replace(layout.live_rows, ref_K=layout.live_rows.ref_K.roll(1)))

    _, pairs = case("masks", reference=POLICY)
    draw = PairDraw(BranchDraw(4, np.array([0, 2]), np.full(2, 2.0)), BranchDraw(3, np.array([1]), np.full(1, 2.0)))
    assert Run(pairs, [draw]).margin == pytest.approx(0, abs=EXACT)
    assert abs(Run(pairs, [draw], layout_edit=other_rows).margin) > BROKEN
