"""What one drawn pair runs, and its work in floating-point operations (METHOD.md section 8).

A matrix product [m, k] x [k, n] counts 2 m k n; norms, rotary, softmax and the token embedding are left out. Entry:
`pair_cost`, which balances micro-batches over ranks. Whole steps are built from the same parts in `work.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ds_stochdpo.pruning.draws import BranchDraw, Kept, PairDraw

AttentionCount = Literal["causal", "rectangle"]
"""Pairs of query and key that count: those the causal mask leaves, which flash kernels multiply; or every query with
every key of its run, which kernels with a mask multiply and which torch's FLOP counter counts for all of them."""
LINEAR_BACKWARD = 2
"""Gradients of inputs and of weights, for one product of the forward pass."""
ATTENTION_BACKWARD = 2.5
"""Fused kernels multiply twice in the forward pass and five times in the backward pass: they rebuild the scores."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder that its matrix products depend on.

    Attributes:
        hidden: Width of the residual stream.
        layers: Decoder layers.
        ffn: Inner width of the feed-forward block.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Width of one head.
        vocab: Rows of the output head.
        ffn_matrices: Matrices of the feed-forward block: 3 if gated, else 2.
        ends_in_product: A layer ends in the product with the last feed-forward matrix and the residual sum. Activation
            checkpointing then leaves that product out of its recomputation, for nothing behind it is kept.
    """

    hidden: int
    layers: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    ffn_matrices: int = 3
    ends_in_product: bool = True


@dataclass(frozen=True)
class PairLengths:
    """Tokens of one pair before the draw.

    Attributes:
        prompt: Prompt tokens.
        chosen: Tokens of the chosen response.
        rejected: Tokens of the rejected response.
        shared_start: Tokens with which both responses begin alike.
    """

    prompt: int
    chosen: int
    rejected: int
    shared_start: int = 0


@dataclass(frozen=True)
class PairTokens:
    """Tokens of one pair after the draw.

    Attributes:
        prompt: Prompt tokens, and those of a shared response start.
        chosen: Chosen response tokens that are run.
        rejected: Rejected response tokens that are run.
        chosen_scored: Chosen positions that reach the head.
        rejected_scored: Rejected positions that reach the head.
        kept: Branch or branches that are back-propagated.
        shared_scored: Positions of the shared start, which reach the head once and without gradient.
    """

    prompt: int
    chosen: int
    rejected: int
    chosen_scored: int
    rejected_scored: int
    kept: Kept = "both"
    shared_scored: int = 0


@dataclass(frozen=True)
class Run:
    """Consecutive tokens that run together: the last `queries` of `keys` causal tokens."""

    queries: int
    keys: int


@dataclass(frozen=True)
class PairLanes:
    """What one pair puts into the live and the frozen lane, as `packing.pack_lanes` lays it.

    Attributes:
        live: Runs with gradient.
        frozen: Runs without.
        live_rows: Rows that meet the head with gradient.
        frozen_rows: Rows of either lane that meet it without.
    """

    live: tuple[Run, ...]
    frozen: tuple[Run, ...]
    live_rows: int
    frozen_rows: int

    @property
    def live_tokens(self) -> int:
        """Tokens run with gradient."""
        return sum(run.queries for run in self.live)

    @property
    def frozen_tokens(self) -> int:
        """Tokens run without gradient."""
        return sum(run.queries for run in self.frozen)


def drawn_tokens(lengths: PairLengths, draw: PairDraw, *, share_response_start: bool = True) -> PairTokens:
    """What is left of a pair after its draw.

    A response is run up to its last sampled position, whose token is never an input.

    Args:
        lengths: The pair.
        draw: What was drawn for it.
        share_response_start: Count tokens that both responses begin with as prompt.

    Returns:
        Its tokens.
    """
    shared = lengths.shared_start if share_response_start else 0

    def own(drawn: BranchDraw) -> tuple[int, int]:
        num_scored = int((drawn.positions >= shared).sum())
        return (max(0, int(drawn.positions[-1]) - shared) if num_scored else 0), num_scored

    (chosen, chosen_scored), (rejected, rejected_scored) = own(draw.chosen), own(draw.rejected)
    prompt = lengths.prompt + shared
    return PairTokens(prompt, chosen, rejected, chosen_scored, rejected_scored, draw.kept, shared_scored=shared)


def pair_lanes(tokens: PairTokens, *, share_prompt: bool = True) -> PairLanes:
    """Runs and scored rows of one pair.

    Args:
        tokens: The pair after its draw.
        share_prompt: False: each response runs behind a prompt of its own.

    Returns:
        What goes into each lane.

    Example:
        >>> pair_lanes(PairTokens(6, 5, 4, 3, 2, kept="chosen"))
        PairLanes(live=(Run(queries=11, keys=11),), frozen=(Run(queries=4, keys=10),), live_rows=3, frozen_rows=2)
    """
    lanes: dict[bool, list[Run]] = {True: [], False: []}
    rows = {True: 0, False: tokens.shared_scored}
    branches = [
        (tokens.kept != "rejected", tokens.chosen, tokens.chosen_scored),
        (tokens.kept != "chosen", tokens.rejected, tokens.rejected_scored),
    ]
    # The live branch brings the prompt, so it stands first.
    for is_live, num_run, num_scored in sorted(branches, key=lambda branch: not branch[0]):
        context = tokens.prompt + num_run
        brings_prompt = not share_prompt or not lanes[True]
        if queries := context if brings_prompt else num_run:
            lanes[is_live].append(Run(queries, context))
        rows[is_live] += num_scored
    return PairLanes(tuple(lanes[True]), tuple(lanes[False]), rows[True], rows[False])


def linear_flops(shape: ModelShape, tokens: int) -> int:
    """Forward work of the projections and feed-forward matrices of all layers on some tokens."""
    query_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    projections = 2 * shape.hidden * (2 * query_width + 2 * kv_width)
    return shape.layers * tokens * (projections + shape.ffn_matrices * _ffn_matrix(shape))


def mlp_flops(shape: ModelShape, tokens: int) -> int:
    """The part of `linear_flops` that is in feed-forward matrices."""
    return shape.layers * tokens * shape.ffn_matrices * _ffn_matrix(shape)


def last_product_flops(shape: ModelShape, tokens: int) -> int:
    """The part of `linear_flops` that stands at the end of each layer: the last feed-forward matrix."""
    return shape.layers * tokens * _ffn_matrix(shape)


def attention_flops(shape: ModelShape, run: Run, count: AttentionCount) -> int:
    """Forward work of scores and weighted values of one run, in all layers.

    Raises:
        ValueError: If there are more queries than keys.

    Example:
        >>> attention_flops(ModelShape(1, 1, 0, 1, 1, 1, 0), Run(2, 3), "causal")
        20
    """
    queries, keys = run.queries, run.keys
    if not 0 <= queries <= keys:
        raise ValueError(f"a run has {queries} queries and {keys} keys; keys include the queries.")
    # Causal: query i of n, counted from 0, sees keys - n + 1 + i keys.
    attended = queries * keys - (queries * (queries - 1) // 2 if count == "causal" else 0)
    return shape.layers * 4 * shape.heads * shape.head_dim * attended


def head_flops(shape: ModelShape, rows: int) -> int:
    """Forward work of the output head on some rows."""
    return 2 * shape.hidden * shape.vocab * rows


def pair_cost(shape: ModelShape, tokens: PairTokens, *, share_prompt: bool = True) -> int:
    """Work of a training step on one pair: live tokens about three forward passes, frozen tokens one.

    Attention counts as causal kernels run it. Activation checkpointing and the head's recomputation are left out.

    Args:
        shape: The model.
        tokens: The pair after its draw.
        share_prompt: False: each back-propagated branch runs a prompt of its own, and so does a frozen one.
    """
    lanes = pair_lanes(tokens, share_prompt=share_prompt)
    live_products = linear_flops(shape, lanes.live_tokens) + head_flops(shape, lanes.live_rows)
    frozen_products = linear_flops(shape, lanes.frozen_tokens) + head_flops(shape, lanes.frozen_rows)
    live_attention, frozen_attention = (
        sum(attention_flops(shape, run, "causal") for run in lane) for lane in (lanes.live, lanes.frozen)
    )
    live = (1 + LINEAR_BACKWARD) * live_products + int((1 + ATTENTION_BACKWARD) * live_attention)
    return live + frozen_products + frozen_attention


def _ffn_matrix(shape: ModelShape) -> int:
    return 2 * shape.hidden * shape.ffn
