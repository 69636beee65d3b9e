import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_stochdpo.pruning.rng import Purpose, permutation, uniform

KEYS = st.integers(0, 2**64 - 1)


def test_values_are_those_of_every_earlier_run():
    """A change here changes every draw of every seed: resumed runs and logged draws would no longer match."""
    got = uniform(0, Purpose.PREFIX, 0, 5, count=3)
    assert got.tolist() == [0.15554057129951004, 0.6212506062092406, 0.0001043174202356445]
    assert permutation(1, 0, 8).tolist() == [3, 5, 6, 1, 2, 7, 0, 4]


@given(seed=KEYS, epoch=KEYS, item=KEYS, step=KEYS, count=st.integers(1, 9))
@settings(max_examples=50, deadline=None)
def test_longer_draws_extend_shorter_ones(seed, epoch, item, step, count):
    long = uniform(seed, Purpose.POSITIONS, epoch, item, step=step, count=count + 4)
    assert np.array_equal(long[:count], uniform(seed, Purpose.POSITIONS, epoch, item, step=step, count=count))
    assert ((long >= 0) & (long < 1)).all()


def test_every_part_of_the_key_gives_another_stream():
    streams = [
        uniform(seed, purpose, epoch, item, step=step, count=2).tolist()
        for seed in (0, 1)
        for purpose in Purpose
        for epoch in (0, 1)
        for item in (0, 1)
        for step in (0, 1)
    ]
    values = [value for stream in streams for value in stream]
    assert len(set(values)) == len(values) == 2 * 5 * 16


def test_global_state_plays_no_part():
    np.random.seed(1)
    first = uniform(3, Purpose.BRANCH, 1, 2)
    np.random.seed(2)
    np.random.random(10)
    assert uniform(3, Purpose.BRANCH, 1, 2) == first


def test_neighbouring_ids_look_independent():
    """4096 ids: mean and lag-1 correlation within four standard deviations of those of uniforms."""
    u = np.array([uniform(0, Purpose.BRANCH, 0, i)[0] for i in range(4096)])
    assert abs(u.mean() - 0.5) < 4 * np.sqrt(1 / 12 / 4096)
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 4 / np.sqrt(4096)


@given(seed=st.integers(0, 99), epoch=st.integers(0, 9), n=st.integers(0, 60))
@settings(max_examples=30, deadline=None)
def test_permutation_visits_every_pair_once(seed, epoch, n):
    order = permutation(seed, epoch, n)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(n))


def test_order_changes_with_seed_and_epoch():
    orders = {tuple(permutation(seed, epoch, 20)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4


@pytest.mark.parametrize("key", ["seed", "epoch", "item_id", "step"])
@pytest.mark.parametrize("value", [-1, 2**64])
def test_keys_outside_64_bits_are_refused(key, value):
    keys = {"seed": 0, "epoch": 0, "item_id": 0, "step": 0, key: value}
    with pytest.raises(ValueError, match=f"{key} is {value}"):
        uniform(keys["seed"], Purpose.ORDER, keys["epoch"], keys["item_id"], step=keys["step"])
