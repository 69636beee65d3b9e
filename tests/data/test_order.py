import numpy as np
import pytest

from ds_stochdpo.data import SetWindows, epoch_order, step_batches
from tests.oracle import random_pairs


def test_every_epoch_visits_each_pair_once_in_its_own_order():
    orders = [epoch_order(50, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    for order in orders:
        assert sorted(order.tolist()) == list(range(50))
    assert len({tuple(order.tolist()) for order in orders}) == 3
    assert (epoch_order(50, 0, 1) == orders[1]).all()


@pytest.mark.parametrize(
    ("num_pairs", "sizes"), [(8, [4, 4]), (9, [4, 4, 1]), (3, [3]), (0, [])]
)  # fmt: skip
def test_steps_cut_the_order_and_keep_the_rest(num_pairs, sizes):
    order = epoch_order(num_pairs, 0, 0)
    steps = step_batches(order, 4)
    assert [len(step) for step in steps] == sizes
    assert np.array_equal(np.concatenate([*steps, np.empty(0, np.int64)]), order)


def test_a_step_needs_a_pair():
    with pytest.raises(ValueError, match="pairs_per_step is 0"):
        step_batches(np.arange(3), 0)


def test_windows_run_on_over_epochs():
    pairs = random_pairs([(1, 2, 3)] * 9, 97)
    windows = SetWindows(pairs, seed=3, pairs_per_step=4)
    taken = [windows.take(step) for step in range(7)]
    assert [(window.epoch, len(window.pairs)) for window in taken] == [
        (0, 4), (0, 4), (0, 1), (1, 4), (1, 4), (1, 1), (2, 4),
    ]  # fmt: skip
    for epoch in (0, 1):
        ids = [pair.pair_id for window in taken[3 * epoch : 3 * epoch + 3] for pair in window.pairs]
        assert ids == epoch_order(9, 3, epoch).tolist()
    assert [windows.passes(step) for step in (0, 3, 6, 7)] == [0, 1, 2, 7 / 3]
