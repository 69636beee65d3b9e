"""What ranks send each other in one optimizer step under ZeRO, and how long it takes. Entry: `step_traffic`, `Cluster`.

Arithmetic only. Bytes are those of whole tensors; of these a rank sends and receives (n - 1) / n. Left out: metrics,
the hash of the plan, the gradient norm, and small weights that ZeRO-3 keeps whole, whose gather is saved.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_stochdpo.pruning.memory import StatePlan

GIGABIT_BYTES = 10**9 / 8


@dataclass(frozen=True)
class Traffic:
    """Bytes of whole tensors in one optimizer step.

    Attributes:
        all_gather: Weights collected from their shards.
        reduce_scatter: Gradients summed into shards.
        all_reduce: Gradients summed everywhere; twice the passage of the others.
    """

    all_gather: int = 0
    reduce_scatter: int = 0
    all_reduce: int = 0

    @property
    def passage(self) -> int:
        """Bytes that pass a rank in each direction, before the factor (n - 1) / n."""
        return self.all_gather + self.reduce_scatter + 2 * self.all_reduce


def step_traffic(num_weights: int, plan: StatePlan, *, micro_batches: int, online_reference: bool = False) -> Traffic:
    """Communication of one optimizer step.

    Under ZeRO-3 each micro-batch gathers every weight for the forward and once more for the backward pass, whatever was
    drawn, and reduces every gradient; so pruning changes it only through the number of micro-batches.

    Args:
        num_weights: Trained weights of the whole model.
        plan: How they are spread.
        micro_batches: Of one rank.
        online_reference: A sharded reference as large as the policy gathers its weights once a micro-batch.

    Returns:
        Bytes; nothing on one rank.

    Example:
        >>> step_traffic(10, StatePlan(zero_stage=3, world_size=4, weight_bytes=2), micro_batches=3)
        Traffic(all_gather=120, reduce_scatter=60, all_reduce=0)
    """
    if plan.world_size == 1:
        return Traffic()
    model = num_weights * plan.weight_bytes
    reference = model * micro_batches if online_reference else 0
    if plan.zero_stage == 3:
        return Traffic(2 * model * micro_batches + reference, model * micro_batches)
    if plan.zero_stage == 2:
        return Traffic(model + reference, model * micro_batches)
    if plan.zero_stage == 1:
        return Traffic(model + reference, model)
    return Traffic(reference, 0, model)


@dataclass(frozen=True)
class Cluster:
    """Rates of the machines; all of them are assumptions of whoever names them.

    Attributes:
        tflops: Matrix products one rank sustains, in 10^12 operations a second.
        gpus_per_node: Ranks of one machine.
        link_gbps: From one GPU to the others of its machine, one direction, in 10^9 bit a second.
        node_gbps: From one machine to the others, all its network cards together, one direction, 10^9 bit a second.
    """

    tflops: float
    gpus_per_node: int
    link_gbps: float
    node_gbps: float

    def compute_s(self, flops: float) -> float:
        """Seconds of one rank's matrix products."""
        return flops / (self.tflops * 1e12)

    def communication_s(self, traffic: Traffic, world_size: int) -> float:
        """Seconds of the collectives, as rings whose slowest link decides; latency is left out.

        Within a machine every rank passes on the bytes; between machines the ring enters and leaves each machine once
        for all its ranks.
        """
        if world_size == 1:
            return 0.0
        passed = traffic.passage * (world_size - 1) / world_size
        inside = passed / (self.link_gbps * GIGABIT_BYTES) if self.gpus_per_node > 1 else 0.0
        between = passed / (self.node_gbps * GIGABIT_BYTES) if world_size > self.gpus_per_node else 0.0
        return max(inside, between)
