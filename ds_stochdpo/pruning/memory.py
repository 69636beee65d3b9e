"""Bytes of a model's state on one rank: weights, gradients and optimizer under ZeRO.

Arithmetic only, exact up to padding (measured in DeepSpeed 0.19.8). Left out: communication buckets, ZeRO-3's small
weights that stay whole, what the allocator wastes, and the device's own context. Entry: `model_state`.
"""

from __future__ import annotations

from dataclasses import dataclass

MASTER_BYTES = 4
"""A master weight, an optimizer moment and a log-prob are fp32."""


@dataclass(frozen=True)
class StatePlan:
    """How ZeRO spreads the state of a model.

    Attributes:
        zero_stage: 0 to 3.
        world_size: Ranks it is spread over.
        weight_bytes: 2 for bf16, 4 for fp32.
        optimizer_on_host: `offload_optimizer` to CPU.
        weights_on_host: `offload_param` to CPU, ZeRO-3 only.
        moments: fp32 values of optimizer state a weight: 2 for Adam, 0 for plain SGD.
        sub_group: Weights ZeRO-3 updates at once (`sub_group_size`).
        max_live: Weights ZeRO-3 keeps gathered at most (`stage3_max_live_parameters`).
    """

    zero_stage: int
    world_size: int
    weight_bytes: int
    optimizer_on_host: bool = False
    weights_on_host: bool = False
    moments: int = 2
    sub_group: int = 10**9
    max_live: int = 10**9


@dataclass(frozen=True)
class Held:
    """Bytes of one kind that a rank holds, on its device and in host memory.

    `in_step` says that they are there only while the optimizer steps, when no activation is.
    """

    device: int = 0
    host: int = 0
    in_step: bool = False


def model_state(num_weights: int, plan: StatePlan) -> dict[str, Held]:
    """State of a model on one rank, as it stands when the last backward pass of a step has ended.

    Args:
        num_weights: Trained weights of the whole model.
        plan: How they are spread.

    Returns:
        Bytes by kind; a kind that the stage does not have is left out.

    Example:
        >>> kinds = model_state(1000, StatePlan(zero_stage=3, world_size=4, weight_bytes=2, max_live=100))
        >>> {kind: held.device for kind, held in kinds.items()}  # doctest: +NORMALIZE_WHITESPACE
        {'weights': 500, 'weights gathered to compute, at most': 200, 'gradients': 500, 'fp32 master weights': 1000,
         'optimizer moments': 2000, 'fp32 gradients in the optimizer step': 1000}
    """
    share = -(-num_weights // plan.world_size)
    stage, width = plan.zero_stage, plan.weight_bytes
    kinds = {"weights": _held((share if stage == 3 else num_weights) * width, plan.weights_on_host)}
    if stage == 3:
        kinds["weights gathered to compute, at most"] = Held(min(num_weights, plan.max_live) * width)
    kinds["gradients"] = _held((share if stage >= 2 else num_weights) * width, plan.optimizer_on_host)
    if stage:
        kinds["fp32 master weights"] = _held(share * MASTER_BYTES, plan.optimizer_on_host)
    moments = (share if stage else num_weights) * MASTER_BYTES * plan.moments
    kinds["optimizer moments"] = _held(moments, plan.optimizer_on_host)
    if stage and plan.optimizer_on_host:
        # Kept between steps; stages 1 and 2 keep a copy of their weights beside them.
        kinds["fp32 gradients"] = Held(host=share * MASTER_BYTES)
        if stage < 3:
            kinds["weights as they go to the host"] = Held(host=share * width)
    elif stage:
        at_once = min(share, plan.sub_group) if stage == 3 else share
        kinds["fp32 gradients in the optimizer step"] = Held(at_once * MASTER_BYTES, in_step=True)
    return kinds


def _held(num_bytes: int, is_on_host: bool) -> Held:
    return Held(host=num_bytes) if is_on_host else Held(num_bytes)
