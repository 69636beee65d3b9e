"""Bytes of a model's state on one rank: weights, gradients and optimizer under ZeRO.

Arithmetic only, exact up to padding (measured in DeepSpeed 0.19.8). Left out: communication buckets, ZeRO-3's small
weights that stay whole, what the allocator wastes, and the device's own context. Entry: `model_state`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_stochdpo.pruning.cost import ModelShape

MASTER_BYTES = 4
"""A master weight, an optimizer moment and a log-prob are fp32."""
VOCAB_TILE = 8192
"""Columns of the vocabulary that meet a chunk of rows at once; a tile of 256 rows stays in the cache of a CPU core."""
TILE_BYTES = 8
"""Of one logit in a tile at its peak: fp32 twice, or once beside its 16-bit form."""


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


def recompute_peak(
    shape: ModelShape,
    *,
    live_tokens: int,
    weight_bytes: int,
    mlp_tile_tokens: int,
    chunk_rows: int,
    offload: bool = False,
) -> dict[str, int]:
    """Parts of the peak of a long micro-batch whose layers are recomputed, with feed-forward blocks in tiles.

    In the backward pass of a layer a live token holds the rows that autograd keeps of it: two of each norm (of 16-bit
    models four, for norms run in fp32), query, attention output, the sum between attention and feed-forward block, key
    and value; the gradients of the layer's output and of the block's input; and its rotary embedding.

    Args:
        shape: The model, with two norms a layer.
        live_tokens: Tokens run with gradient.
        weight_bytes: 2 for bf16, 4 for fp32.
        mlp_tile_tokens: Tokens that meet a feed-forward block at once.
        chunk_rows: `score_chunk_rows`.
        offload: Whether the inputs of layers wait on the host, but for those of two layers.

    Returns:
        Bytes by part; beside weights, gradients and optimizer. No part grows with the vocabulary, and none with the
        feed-forward block times the tokens.
    """
    norm_rows = 4 if weight_bytes < MASTER_BYTES else 2
    widths = (2 * norm_rows + 5) * shape.hidden + 2 * (shape.kv_heads + 1) * shape.head_dim
    inputs = min(2, shape.layers) if offload else shape.layers
    return {
        "saved layer inputs": weight_bytes * live_tokens * shape.hidden * inputs,
        "one layer": weight_bytes * live_tokens * widths,
        "one feed-forward tile": weight_bytes * 6 * shape.ffn * min(mlp_tile_tokens, live_tokens),
        "one head tile": TILE_BYTES * chunk_rows * min(VOCAB_TILE, shape.vocab),
    }
