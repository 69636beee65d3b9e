"""Gradients of whole batches against autograd, over every outcome of every draw (METHOD.md M13-M17, M21)."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from exact_outcomes import intervals, response_outcomes, weighted_sum
from toy_policy import (
    BETA,
    POLICY,
    REFERENCE,
    ToyPair,
    gradient,
    make_pairs,
    margins,
    pruned_gradient,
    sampled_loss,
    token_logps,
)

from ds_stochdpo.config import PruningPlan
from ds_stochdpo.pruning import BranchDraw, PairDraw, full_draw, jensen_gap_bound, preference_loss
from ds_stochdpo.pruning.branches import antithetic_couples, madow_sample

LOSSES = [("sigmoid", 0.0), ("sigmoid", 0.2), ("robust", 0.2), ("hinge", 0.0)]
LENGTHS = [(4, 3), (2, 4), (3, 3), (1, 2)]
PAIRS = make_pairs(LENGTHS)
FULL = [full_draw(*lengths) for lengths in LENGTHS]
PLANS = [
    PruningPlan(position_keep=0.4),
    PruningPlan(position_keep=0.5, position_sampler="bernoulli"),
    PruningPlan(position_keep=0.5, position_sampler="fixed"),
    PruningPlan(position_keep=0.5, position_sampler="stratified"),
    PruningPlan(prefix_keep=0.6, prefix_sampler="two_point"),
    PruningPlan(0.5, "systematic", 0.7, "floor", 0.3),
    PruningPlan(0.5, "stratified", 0.5, "geometric"),
    PruningPlan(0.6, "bernoulli", 0.6, "uniform"),
]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Thousands of tiny operations: on a busy machine waiting for a second thread costs ten times the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tight(actual, expected):
    return torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def keep(draws, is_chosen, chosen_prob):
    """The draws with one branch kept in each pair."""
    return [
        replace(d, kept="chosen" if c else "rejected", kept_prob=float(p if c else 1 - p))
        for d, c, p in zip(draws, is_chosen, chosen_prob, strict=True)
    ]


def joint_outcomes(plan, lengths=LENGTHS[0]):
    """(probability, draw) of one pair over positions and prefixes."""
    for prob, draws in response_outcomes(plan, list(lengths)):
        yield prob, PairDraw(*draws)


def iid_outcomes(probs):
    for kept in itertools.product([True, False], repeat=len(probs)):
        yield float(np.prod([p if c else 1 - p for c, p in zip(kept, probs, strict=True)])), kept


def balanced_outcomes(num_pairs):
    coins = list(itertools.product([0.25, 0.75], repeat=(num_pairs + 1) // 2))
    return [(1 / len(coins), antithetic_couples(num_pairs, np.array(c))) for c in coins]


def madow_outcomes(probs):
    total = np.cumsum(probs)
    return [(prob, madow_sample(np.array(probs), start)) for prob, start in intervals(np.ceil(total) - total)]


DESIGNS = {
    "iid": ([0.3, 0.05, 0.5, 0.8], iid_outcomes([0.3, 0.05, 0.5, 0.8])),
    "balanced": ([0.5] * 4, balanced_outcomes(4)),
    "madow": ([0.3, 0.25, 0.6, 0.8], madow_outcomes([0.3, 0.25, 0.6, 0.8])),
}
DESIGNS = {name: (probs, list(outcomes)) for name, (probs, outcomes) in DESIGNS.items()}


def mean_over_branches(design, draws, loss=LOSSES[0], pairs=PAIRS, **options):
    probs, outcomes = DESIGNS[design]
    return sum(
        prob * pruned_gradient(POLICY, pairs, keep(draws, kept, probs), loss, **options) for prob, kept in outcomes
    )


@pytest.mark.parametrize("loss", LOSSES)
def test_nothing_pruned_gives_the_gradient_of_the_loss(loss):
    expected = gradient(lambda theta: sampled_loss(theta, PAIRS, FULL, loss), POLICY)
    tight(pruned_gradient(POLICY, PAIRS, FULL, loss), expected)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("design", DESIGNS)
def test_branch_pruning_is_unbiased_over_all_outcomes(design, loss):
    """METHOD.md M15 with every position scored: the mean is the exact DPO gradient."""
    expected = gradient(lambda theta: sampled_loss(theta, PAIRS, FULL, loss), POLICY)
    tight(mean_over_branches(design, FULL, loss), expected)


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("plan", PLANS)
def test_branch_pruning_is_unbiased_given_positions_and_prefixes(design, plan):
    """One sampled outcome of positions and prefixes a pair; the branches are enumerated."""
    draws = []
    for i, lengths in enumerate(LENGTHS):
        outcomes = list(joint_outcomes(plan, lengths))
        draws.append(outcomes[(3 * i + 1) % len(outcomes)][1])
    expected = gradient(lambda theta: sampled_loss(theta, PAIRS, draws, LOSSES[0]), POLICY)
    tight(mean_over_branches(design, draws), expected)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("plan", PLANS)
def test_all_three_together_average_to_the_gradient_of_the_expected_sampled_loss(plan, loss):
    """METHOD.md M13 and M15: mean gradient = grad F, and 0 <= F - L <= beta^2 Var / 8."""
    pair, p = PAIRS[:1], 0.3
    outcomes = list(joint_outcomes(plan))
    mean = sum(
        prob * q * pruned_gradient(POLICY, pair, keep([draw], [is_chosen], [p]), loss)
        for prob, draw in outcomes
        for q, is_chosen in ((p, True), (1 - p, False))
    )

    def expected_loss(theta):
        return sum(prob * sampled_loss(theta, pair, [draw], loss) for prob, draw in outcomes)

    tight(mean, gradient(expected_loss, POLICY))
    probs = torch.tensor([prob for prob, _ in outcomes], dtype=torch.float64)
    margin = torch.cat([margins(POLICY, pair, [draw]) for _, draw in outcomes])
    full = margins(POLICY, pair, FULL[:1])[0]
    tight(probs @ margin, full)
    variance = float(probs @ (margin - full) ** 2)
    gap = float(expected_loss(POLICY) - sampled_loss(POLICY, pair, FULL[:1], loss))
    bound = BETA * variance**0.5 / 2 if loss[0] == "hinge" else jensen_gap_bound(BETA, variance)
    assert -1e-12 <= gap <= bound + 1e-12
    if loss[0] != "hinge":
        assert gap > 1e-4


def test_sampled_gradient_is_not_the_gradient_of_the_full_loss():
    """What METHOD.md section 5 says is biased is biased: the test above does not hold for L."""
    outcomes = joint_outcomes(PLANS[1])
    mean = sum(prob * pruned_gradient(POLICY, PAIRS[:1], [draw]) for prob, draw in outcomes)
    full = gradient(lambda theta: sampled_loss(theta, PAIRS[:1], FULL[:1], LOSSES[0]), POLICY)
    assert (mean - full).abs().max() > 1e-3


@pytest.mark.parametrize("plan", PLANS)
def test_at_the_reference_every_draw_gives_the_exact_slope(plan):
    """There all log-ratios are 0, and the sampled gradient is unbiased for the full one."""
    mean = torch.zeros(3, dtype=torch.float64)
    for prob, draw in joint_outcomes(plan):
        margin_P = margins(REFERENCE, PAIRS[:1], [draw])
        _, slope_P = preference_loss(margin_P, beta=BETA, loss_type="sigmoid", label_smoothing=0.0)
        assert margin_P.item() == 0
        assert slope_P.item() == -BETA / 2
        mean += prob * pruned_gradient(REFERENCE, PAIRS[:1], [draw])
    full = gradient(lambda theta: sampled_loss(theta, PAIRS[:1], FULL[:1], LOSSES[0]), REFERENCE)
    tight(mean, full)


def test_gap_bound_does_not_hold_for_hinge():
    """A margin of 1 / beta +- s sits on the corner: gap beta s / 2, against beta^2 s^2 / 8."""
    s = 0.5
    margin_P = torch.tensor([1 / BETA - s, 1 / BETA + s], dtype=torch.float64)
    loss_P, _ = preference_loss(margin_P, beta=BETA, loss_type="hinge", label_smoothing=0.0)
    assert loss_P.mean().item() == pytest.approx(BETA * s / 2, abs=1e-12)
    assert loss_P.mean() > jensen_gap_bound(BETA, s * s)


def branch_gradients():
    """G_w and G_l of each pair, [P, 3] each."""
    return [
        torch.stack([pruned_gradient(POLICY, [p], [replace(d, kept=kept)]) for p, d in zip(PAIRS, FULL, strict=True)])
        for kept in ("chosen", "rejected")
    ]


def spread(outcomes, probs):
    grads = [pruned_gradient(POLICY, PAIRS, keep(FULL, kept, probs)) for _, kept in outcomes]
    mean = sum(prob * g for (prob, _), g in zip(outcomes, grads, strict=True))
    return float(sum(prob * ((g - mean) ** 2).sum() for (prob, _), g in zip(outcomes, grads, strict=True)))


@pytest.mark.parametrize("p", [0.5, 0.3, 0.05])
def test_variance_of_one_pair(p):
    """METHOD.md M16."""
    chosen, rejected = (g[0] for g in branch_gradients())
    expected = (chosen**2).sum() / p + (rejected**2).sum() / (1 - p) - ((chosen + rejected) ** 2).sum()
    grads = [pruned_gradient(POLICY, PAIRS[:1], keep(FULL[:1], [c], [p])) for c in (True, False)]
    variance = sum(q * ((g - chosen - rejected) ** 2).sum() for q, g in zip((p, 1 - p), grads, strict=True))
    tight(variance, expected)
    if p == 0.5:
        tight(variance, ((chosen - rejected) ** 2).sum())


def test_variance_of_a_batch_by_design():
    """METHOD.md M17: couples leave the difference of neighbours, iid the whole, one coin the mean."""
    chosen, rejected = branch_gradients()
    difference = chosen - rejected
    n = len(PAIRS)
    couples = ((difference[0::2] - difference[1::2]) ** 2).sum() / n**2
    one_coin = [(0.5, [c] * n) for c in (True, False)]
    half = [0.5] * n
    assert spread(DESIGNS["balanced"][1], half) == pytest.approx(couples.item(), abs=1e-12)
    assert spread(list(iid_outcomes(half)), half) == pytest.approx((difference**2).sum().item() / n**2, abs=1e-12)
    assert spread(one_coin, half) == pytest.approx((difference.mean(0) ** 2).sum().item(), abs=1e-12)


def trimmed(draw: BranchDraw, start: int) -> BranchDraw:
    behind = draw.positions >= start
    return replace(draw, positions=draw.positions[behind], weights=draw.weights[behind])


def test_shared_response_start_may_be_left_out():
    """METHOD.md M21: same margin and gradient without the shared tokens, and unbiased when sampled."""
    start = PAIRS[2].chosen[:2]
    pair = [ToyPair(*(torch.cat((start, f)) for f in (PAIRS[0].chosen[:2], PAIRS[0].rejected)))]
    full = full_draw(4, 5)
    without = replace(full, chosen=trimmed(full.chosen, 2), rejected=trimmed(full.rejected, 2))
    tight(margins(POLICY, pair, [without]), margins(POLICY, pair, [full]))
    tight(pruned_gradient(POLICY, pair, [without]), pruned_gradient(POLICY, pair, [full]))
    mean = sum(
        prob * margins(POLICY, pair, [replace(d, chosen=trimmed(d.chosen, 2), rejected=trimmed(d.rejected, 2))])
        for prob, d in joint_outcomes(PLANS[5], (4, 5))
    )
    tight(mean, margins(POLICY, pair, [full]))


@pytest.mark.parametrize(
    ("mistake", "design", "plan"),
    [
        ("branch probability left out", "balanced", None),
        ("branch probability left out", "iid", None),
        ("branch probabilities swapped", "iid", None),
        ("divided by the kept chosen branches", "iid", None),
        ("position weight left out", "balanced", PLANS[0]),
    ],
)
def test_mistakes_break_the_identity(mistake, design, plan):
    """Each wrong weighting misses the mean gradient by far more than rounding, so the tests above see it."""
    draws = FULL
    if plan:
        draws = [next(joint_outcomes(plan, lengths))[1] for lengths in LENGTHS]
    expected = gradient(lambda theta: sampled_loss(theta, PAIRS, draws, LOSSES[0]), POLICY)
    tight(mean_over_branches(design, draws), expected)
    assert (mean_over_branches(design, draws, mistake=mistake) - expected).abs().max() > 1e-3


def test_swapped_position_weights_bias_the_margin():
    """Chosen weights on rejected positions and the other way round, where the two laws differ."""
    plan = PruningPlan(prefix_keep=0.6, prefix_sampler="uniform")
    full = margins(POLICY, PAIRS[:1], FULL[:1])
    swapped = torch.zeros(1, dtype=torch.float64)
    for prob, d in joint_outcomes(plan):
        shared = min(len(d.chosen.weights), len(d.rejected.weights))
        chosen, rejected = d.chosen.weights.copy(), d.rejected.weights.copy()
        chosen[:shared], rejected[:shared] = d.rejected.weights[:shared], d.chosen.weights[:shared]
        draw = PairDraw(replace(d.chosen, weights=chosen), replace(d.rejected, weights=rejected))
        swapped += prob * margins(POLICY, PAIRS[:1], [draw])
    assert (swapped - full).abs().max() > 1e-3


def test_reference_at_other_positions_breaks_the_estimate_at_the_reference():
    """With the policy at one draw and the reference at another the log-ratio is noise where it must be 0."""
    logps = token_logps(REFERENCE, PAIRS[0].chosen).numpy()
    (_, first), (_, second), *_ = joint_outcomes(PLANS[1])
    assert abs(weighted_sum(first.chosen, logps) - weighted_sum(second.chosen, logps)) > 1e-3
