import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_stochdpo.config import PruningPlan
from ds_stochdpo.errors import ConfigError
from ds_stochdpo.pruning import (
    PairDraw,
    branch_coefficient,
    full_draw,
    jensen_gap_bound,
    preference_loss,
    pruned_surrogate,
)

LOSSES = [
    ("sigmoid", 0.0),
    ("sigmoid", 0.1),
    ("sigmoid", 0.5),
    ("robust", 0.1),
    ("robust", 0.4),
    ("hinge", 0.0),
]


def loss_at(reward_margin, loss_type, smoothing, *, beta=0.5, dtype=torch.float64):
    margin_P = torch.tensor([reward_margin / beta], dtype=dtype)
    loss_P, slope_P = preference_loss(margin_P, beta=beta, loss_type=loss_type, label_smoothing=smoothing)
    return loss_P.item(), slope_P.item() / beta


@pytest.mark.parametrize(
    ("reward_margin", "loss_type", "smoothing", "expected"),
    [
        # log(1 + exp(-2)) = 0.126928, and + 2 e by M2.
        (2.0, "sigmoid", 0.0, 0.126928),
        (2.0, "sigmoid", 0.1, 0.326928),
        (2.0, "sigmoid", 0.5, 1.126928),
        # log(1 + exp(3)) = 3.048587, and - 3 e.
        (-3.0, "sigmoid", 0.0, 3.048587),
        (-3.0, "sigmoid", 0.1, 2.748587),
        (-3.0, "sigmoid", 0.5, 1.548587),
        # 0.126928 - 2 * 0.1 / 0.8 and 3.048587 + 3 * 0.1 / 0.8.
        (2.0, "robust", 0.1, -0.123072),
        (-3.0, "robust", 0.1, 3.423587),
        (2.0, "robust", 0.0, 0.126928),
        (0.0, "sigmoid", 0.0, math.log(2)),
        (0.25, "hinge", 0.0, 0.75),
        (2.0, "hinge", 0.0, 0.0),
        (-3.0, "hinge", 0.0, 4.0),
    ],
)
def test_loss_worked_by_hand(reward_margin, loss_type, smoothing, expected):
    assert loss_at(reward_margin, loss_type, smoothing)[0] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("reward_margin", "loss_type", "smoothing", "expected"),
    [
        # Slope over beta; logistic(-2) = 0.119203, logistic(3) = 0.952574.
        (2.0, "sigmoid", 0.0, -0.119203),
        (2.0, "sigmoid", 0.1, -0.019203),
        (2.0, "sigmoid", 0.5, 0.380797),
        (-3.0, "sigmoid", 0.1, -0.852574),
        (2.0, "robust", 0.1, -0.244203),
        (-3.0, "robust", 0.1, -1.077574),
        (0.25, "hinge", 0.0, -1.0),
        (2.0, "hinge", 0.0, 0.0),
        (0.0, "sigmoid", 0.0, -0.5),
    ],
)
def test_slope_worked_by_hand(reward_margin, loss_type, smoothing, expected):
    assert loss_at(reward_margin, loss_type, smoothing)[1] == pytest.approx(expected, abs=1e-6)


@given(margin=st.floats(-300, 300), beta=st.floats(0.01, 3.0), loss=st.sampled_from(LOSSES))
@settings(max_examples=150, deadline=None)
def test_slope_is_the_derivative_of_the_loss(margin, beta, loss):
    margin_P = torch.tensor([margin], dtype=torch.float64, requires_grad=True)
    loss_P, slope_P = preference_loss(margin_P, beta=beta, loss_type=loss[0], label_smoothing=loss[1])
    assert not slope_P.requires_grad
    loss_P.sum().backward()
    assert slope_P.item() == pytest.approx(margin_P.grad.item(), abs=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_stable_far_out_and_at_least_float32(loss, dtype):
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    margin_P = torch.tensor([200.0, -200.0], dtype=dtype)
    loss_P, slope_P = preference_loss(margin_P, beta=1.0, loss_type=loss[0], label_smoothing=loss[1])
    assert loss_P.dtype == slope_P.dtype == kept
    linear = -loss[1] / (1 - 2 * loss[1]) if loss[0] == "robust" else loss[1]
    expected = [linear * 200, (201 if loss[0] == "hinge" else 200) - linear * 200]
    assert loss_P.tolist() == pytest.approx(expected, rel=1e-6)
    assert slope_P.tolist() == pytest.approx([linear, linear - 1], rel=1e-6)


def test_smoothing_lets_the_slope_change_sign_and_robust_does_not():
    """METHOD.md M3."""
    assert loss_at(1.0, "sigmoid", 0.1)[1] < 0 < loss_at(4.0, "sigmoid", 0.1)[1]
    assert loss_at(50.0, "robust", 0.4)[1] < 0


@pytest.mark.parametrize("e", [0.1, 0.3])
def test_robust_loss_is_unbiased_under_flipped_labels(e):
    """Mean over a flip with probability e is the clean loss: what robust is for."""
    flipped = (1 - e) * loss_at(1.3, "robust", e)[0] + e * loss_at(-1.3, "robust", e)[0]
    assert flipped == pytest.approx(loss_at(1.3, "sigmoid", 0.0)[0], abs=1e-12)


@pytest.mark.parametrize(
    ("loss_type", "smoothing", "match"),
    [
        ("ipo", 0.0, "loss_type is 'ipo'"),
        ("robust", 0.5, "label_smoothing is 0.5; loss_type robust"),
        ("hinge", 0.1, "label_smoothing is 0.1; loss_type hinge"),
        ("sigmoid", 0.6, "label_smoothing is 0.6; loss_type sigmoid"),
    ],
)
def test_wrong_losses_are_named(loss_type, smoothing, match):
    with pytest.raises(ConfigError, match=match):
        loss_at(0.0, loss_type, smoothing)


def test_coefficient_of_kept_and_dropped_branches():
    whole = full_draw(2, 2)
    draws = [
        whole,
        PairDraw(whole.chosen, whole.rejected, "chosen", 0.25),
        PairDraw(whole.chosen, whole.rejected, "rejected", 0.5),
    ]
    slope_P = torch.tensor([-0.5, -0.25, -1.0], dtype=torch.float64, requires_grad=True)
    coefficient_P2 = branch_coefficient(slope_P, draws)
    assert coefficient_P2.tolist() == [[-0.5, 0.5], [-1.0, 0.0], [0.0, 2.0]]
    assert not coefficient_P2.requires_grad
    assert branch_coefficient(torch.zeros(0), []).shape == (0, 2)
    with pytest.raises(ValueError, match=r"shape \(3,\) but there are 2 draws"):
        branch_coefficient(slope_P, draws[:2])


def test_surrogate_differentiates_log_probs_only():
    logp_K = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    weight_K = torch.tensor([2.0, 4.0], dtype=torch.float64)
    coefficient_K = torch.tensor([-0.5, 0.5], dtype=torch.float64, requires_grad=True)
    surrogate = pruned_surrogate(logp_K, weight_K, coefficient_K, num_pairs_global=4)
    assert surrogate.item() == (-0.5 * 2 * -1 + 0.5 * 4 * -2) / 4
    surrogate.backward()
    assert logp_K.grad.tolist() == [-0.25, 0.5]
    assert coefficient_K.grad is None


def test_surrogate_of_no_position_is_zero_and_still_differentiable():
    logp_K = torch.zeros(3, requires_grad=True)[:0]
    surrogate = pruned_surrogate(logp_K, torch.zeros(0), torch.zeros(0), num_pairs_global=2)
    assert surrogate.item() == 0
    surrogate.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_surrogate_sums_in_float32(dtype):
    surrogate = pruned_surrogate(
        torch.full((3,), -1.0, dtype=dtype),
        torch.ones(3, dtype=torch.float64),
        torch.ones(3),
        num_pairs_global=1,
    )
    assert (surrogate.dtype, surrogate.item()) == (torch.float32, -3.0)


def test_surrogate_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match=r"shapes \(2,\), \(3,\), \(2,\)"):
        pruned_surrogate(torch.zeros(2), torch.zeros(3), torch.zeros(2), num_pairs_global=1)
    with pytest.raises(ValueError, match="num_pairs_global is 0"):
        pruned_surrogate(torch.zeros(2), torch.zeros(2), torch.zeros(2), num_pairs_global=0)


def test_bound_is_beta_squared_times_variance_over_eight():
    assert jensen_gap_bound(0.2, 3.0) == pytest.approx(0.015, abs=1e-15)


def test_plan_defaults_prune_nothing():
    plan = PruningPlan()
    assert (plan.position_keep, plan.prefix_keep, plan.branch) == (1.0, 1.0, "both")
