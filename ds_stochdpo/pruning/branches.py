"""Branch pruning: which branch of a pair is back-propagated, with which probability (METHOD.md section 4).

Shape suffix: P pairs of one optimizer step, over all ranks. Entry: `draw_branches`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ds_stochdpo.config import PruningPlan
from ds_stochdpo.pruning.rng import Purpose, uniform

BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


def draw_branches(
    plan: PruningPlan,
    *,
    seed: int,
    epoch: int,
    step: int,
    pair_ids: Sequence[int],
    chosen_lengths: Sequence[int],
    rejected_lengths: Sequence[int],
) -> tuple[BoolArray, FloatArray]:
    """Choose one branch of every pair.

    `iid` depends on (seed, epoch, pair id) alone. `balanced` depends on the step's whole set of pairs, so
    it has to be called with all of them on every rank; the order in which they are given does not matter.
    Steps are independent: making a later step complete an earlier one would be biased given the past.

    Args:
        plan: `branch_prob` and `branch_balance` are used.
        seed: Seed of the run.
        epoch: Pass over the pairs.
        step: Optimizer step, used by `balanced`.
        pair_ids: Ids of the P pairs.
        chosen_lengths: Response tokens of each chosen branch.
        rejected_lengths: Response tokens of each rejected branch.

    Returns:
        keeps_chosen_P: True where the chosen branch is kept, False where the rejected one is; bool [P].
        chosen_prob_P: Probability of True, in (0, 1); float64 [P].

    Source: antithetic couples, our derivation (METHOD.md M17); unequal probabilities, Madow 1949 (M18).
    """
    chosen_prob_P = chosen_keep_probs(plan.branch_prob, chosen_lengths, rejected_lengths)
    num_pairs = len(pair_ids)
    if plan.branch_balance == "iid":
        coins_P = [uniform(seed, Purpose.BRANCH, epoch, pair_id)[0] for pair_id in pair_ids]
        return np.array(coins_P, dtype=np.float64) < chosen_prob_P, chosen_prob_P
    order_P = length_order(pair_ids, chosen_lengths, rejected_lengths)
    coins = uniform(seed, Purpose.BRANCH_STEP, epoch, 0, step=step, count=max(1, (num_pairs + 1) // 2))
    keeps_chosen_P = np.empty(num_pairs, dtype=np.bool_)
    if plan.branch_prob == 0.5:
        keeps_chosen_P[order_P] = antithetic_couples(num_pairs, coins)
    else:
        keeps_chosen_P[order_P] = madow_sample(chosen_prob_P[order_P], float(coins[0]))
    return keeps_chosen_P, chosen_prob_P


def chosen_keep_probs(
    branch_prob: float | str, chosen_lengths: Sequence[int], rejected_lengths: Sequence[int]
) -> FloatArray:
    """Probability of keeping the chosen branch of each pair; float64 [P].

    `sqrt_length` follows the norm of a branch's gradient, which grows about as the root of its length
    (METHOD.md M19).

    Example:
        >>> chosen_keep_probs("sqrt_length", [4, 9], [1, 9]).round(3).tolist()
        [0.667, 0.5]
    """
    if branch_prob == "sqrt_length":
        chosen_P = np.sqrt(np.asarray(chosen_lengths, dtype=np.float64))
        return chosen_P / (chosen_P + np.sqrt(np.asarray(rejected_lengths, dtype=np.float64)))
    return np.full(len(chosen_lengths), float(branch_prob))


def length_order(pair_ids: Sequence[int], chosen_lengths: Sequence[int], rejected_lengths: Sequence[int]) -> IntArray:
    """Indices that sort pairs by total response length, ties by id; int64 [P]."""
    total_P = np.asarray(chosen_lengths, dtype=np.int64) + np.asarray(rejected_lengths, dtype=np.int64)
    return np.lexsort((np.asarray(pair_ids, dtype=np.int64), total_P)).astype(np.int64)


def antithetic_couples(num_pairs: int, coins: FloatArray) -> BoolArray:
    """Neighbours keep opposite branches, one coin a couple; an odd last pair has a coin of its own.

    Every pair keeps either branch with probability 1/2, and the number of kept chosen branches is P/2,
    rounded up or down when P is odd.

    Example:
        >>> antithetic_couples(5, np.array([0.1, 0.9, 0.1])).tolist()
        [True, False, False, True, True]
    """
    first_of_couple = coins[: (num_pairs + 1) // 2] < 0.5
    keeps_chosen_P = np.empty(num_pairs, dtype=np.bool_)
    keeps_chosen_P[0::2] = first_of_couple
    keeps_chosen_P[1::2] = ~first_of_couple[: num_pairs // 2]
    return keeps_chosen_P


def madow_sample(prob_P: FloatArray, start: float) -> BoolArray:
    """Systematic sampling with unequal probabilities: items where the running sum passes a whole number.

    Item i is taken with probability prob_i exactly, and every run of neighbours holds its expected count
    within 1.

    Args:
        prob_P: Probabilities in (0, 1), in the order to balance over.
        start: One uniform in [0, 1).

    Example:
        >>> madow_sample(np.array([0.25, 0.25, 0.5, 0.5]), 0.4).tolist()
        [False, False, True, False]
    """
    passed = np.floor(np.concatenate(([0.0], np.cumsum(prob_P))) + start)
    return np.diff(passed) > 0
