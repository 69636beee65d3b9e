"""Bytes that one rank holds: weights, gradients and optimizer under ZeRO, activations and the output head.

Arithmetic only. The state of the model is exact up to padding (measured in DeepSpeed 0.19.8); activations are a model
of what autograd keeps, good to some tens of percent. Left out: communication buckets, ZeRO-3's small weights that
stay whole, what the allocator wastes, and the device's own context. Entry: `model_state`, `activation_bytes`,
`head_bytes`.
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
LOGIT_BYTES = 12
"""Of one logit of a head without tiles at its peak: the logit, its log-softmax and the gradient, each fp32."""


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


def activation_bytes(
    shape: ModelShape,
    *,
    live_tokens: int,
    frozen_tokens: int,
    weight_bytes: int,
    checkpointing: bool,
    mlp_tile_tokens: int | None = None,
    offload: bool = False,
) -> int:
    """Activations of the decoder layers at the peak of one micro-batch.

    A live token keeps, in each layer, about 6 rows of the model's width, 2 of the keys' and 4 of the feed-forward
    block. With checkpointing it keeps one row a layer, and the rest of one layer at a time. A frozen
    token keeps nothing behind the layer it is in.

    Args:
        shape: The model.
        live_tokens: Tokens run with gradient.
        frozen_tokens: Tokens run without.
        weight_bytes: 2 for bf16, 4 for fp32.
        checkpointing: Whether layers of the live lane are recomputed in the backward pass.
        mlp_tile_tokens: Tokens that meet a feed-forward block at once, each with 6 rows of it; None: all.
        offload: Whether the inputs of recomputed layers wait on the host, but for those of two layers.

    Returns:
        Bytes on the device, without the output head. A model of what is kept, not a bound.

    Source: our derivation; within a quarter of what autograd saves in a small Llama and GPT-2 (tests).
    """
    hidden, ffn, kv_width = shape.hidden, shape.ffn, shape.kv_heads * shape.head_dim
    layer, frozen, tile = 6 * hidden + 2 * kv_width, 4 * hidden, 0
    if mlp_tile_tokens is None:
        layer, frozen = layer + 4 * ffn, frozen + 2 * ffn
    else:
        tile = 6 * ffn * min(mlp_tile_tokens, max(live_tokens, frozen_tokens))
    if checkpointing:
        # The input of every layer is kept in the dtype of the weights.
        live = hidden * (min(2, shape.layers) if offload else shape.layers) + layer
    else:
        live = layer * shape.layers
    return weight_bytes * (live_tokens * live + frozen_tokens * frozen + tile)


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


def head_bytes(
    shape: ModelShape, *, live_rows: int, chunk_rows: int, recompute: bool, weight_bytes: int
) -> dict[str, int]:
    """Memory of the output head in its backward pass.

    Args:
        shape: The model.
        live_rows: Scored rows with gradient in one micro-batch.
        chunk_rows: `score_chunk_rows`.
        recompute: `score_recompute`; False keeps the slope of every row.
        weight_bytes: 2 for bf16, 4 for fp32.

    Returns:
        Bytes of one tile's logits, of slopes that are kept (a tile is then as wide as the vocabulary), and of the
        gradient of the head's matrix, which is summed over the tiles in fp32 whatever the weights are.
    """
    matrix = shape.vocab * shape.hidden
    # 16-bit weights: beside the fp32 sum, one chunk's product and then the rounded result.
    beside = weight_bytes if weight_bytes < MASTER_BYTES else 0
    columns = min(VOCAB_TILE, shape.vocab) if recompute else shape.vocab
    return {
        "chunk": TILE_BYTES * columns * min(chunk_rows, live_rows),
        "kept": 0 if recompute else weight_bytes * shape.vocab * live_rows,
        "gradient": (MASTER_BYTES + beside) * matrix if live_rows else 0,
    }


def unchunked_logits_bytes(shape: ModelShape, *, rows: int) -> int:
    """Logits of `rows` rows at once, which a head without chunks would hold."""
    return LOGIT_BYTES * shape.vocab * rows
