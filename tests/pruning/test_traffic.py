"""Bytes that ranks send and the time it takes, by hand."""

import pytest

from ds_stochdpo.pruning.memory import StatePlan
from ds_stochdpo.pruning.traffic import Cluster, Traffic, step_traffic

WEIGHTS = 1000
CLUSTER = Cluster(tflops=100.0, gpus_per_node=8, link_gbps=3600.0, node_gbps=400.0)


def plan(stage, world_size=4):
    return StatePlan(zero_stage=stage, world_size=world_size, weight_bytes=2)


@pytest.mark.parametrize(
    ("stage", "traffic", "passage"),
    [
        # Gradients once a step, to everyone.
        (0, Traffic(0, 0, 2000), 4000),
        (1, Traffic(2000, 2000), 4000),
        # Gradients in each of three micro-batches.
        (2, Traffic(2000, 6000), 8000),
        # Weights too, forward and backward.
        (3, Traffic(12000, 6000), 18000),
    ],
)
def test_each_stage(stage, traffic, passage):
    found = step_traffic(WEIGHTS, plan(stage), micro_batches=3)
    assert found == traffic
    assert found.passage == passage


def test_an_online_reference_gathers_once_a_micro_batch():
    found = step_traffic(WEIGHTS, plan(3), micro_batches=3, online_reference=True)
    assert found == Traffic(18000, 6000)


def test_one_rank_sends_nothing():
    assert step_traffic(WEIGHTS, plan(3, world_size=1), micro_batches=3) == Traffic()
    assert CLUSTER.communication_s(Traffic(10**12), 1) == 0


def test_seconds():
    """36 GB: 7/8 of it at 450 GB/s inside one node; 15/16 of it at 50 GB/s between two."""
    traffic = Traffic(all_gather=24 * 10**9, reduce_scatter=12 * 10**9)
    assert CLUSTER.communication_s(traffic, 8) == pytest.approx(36 * 7 / 8 / 450)
    assert CLUSTER.communication_s(traffic, 16) == pytest.approx(36 * 15 / 16 / 50)
    assert CLUSTER.compute_s(2.5e14) == pytest.approx(2.5)
