import numpy as np
import pytest

from ds_stochdpo.data import epoch_order, step_batches


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
