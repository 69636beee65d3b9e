"""Work of a draw in floating-point operations, for balancing micro-batches over ranks (METHOD.md section 8).

A matrix product [m, k] x [k, n] counts 2 m k n; norms, rotary, softmax and the token embedding are left
out. Attention counts the pairs of query and key that the causal mask leaves. Entry: `pair_cost`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_stochdpo.pruning.draws import Kept

# Forward once, then gradients of inputs and of weights.
LIVE_PASSES = 3
FROZEN_PASSES = 1


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
    """

    hidden: int
    layers: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    ffn_matrices: int = 3


@dataclass(frozen=True)
class PairTokens:
    """Tokens of one pair after the draw.

    Attributes:
        prompt: Prompt tokens.
        chosen: Chosen response tokens that are run.
        rejected: Rejected response tokens that are run.
        chosen_scored: Chosen positions that reach the head.
        rejected_scored: Rejected positions that reach the head.
        kept: Branch or branches that are back-propagated.
    """

    prompt: int
    chosen: int
    rejected: int
    chosen_scored: int
    rejected_scored: int
    kept: Kept = "both"


def forward_flops(shape: ModelShape, *, query_tokens: int, key_tokens: int, scored_rows: int) -> int:
    """Forward work of the last `query_tokens` of `key_tokens` causal tokens, and of the head on some rows.

    Example:
        >>> forward_flops(ModelShape(1, 1, 0, 1, 1, 1, 0), query_tokens=2, key_tokens=3, scored_rows=0)
        36
    """
    if not 0 <= query_tokens <= key_tokens:
        raise ValueError(f"query_tokens is {query_tokens} of {key_tokens} key_tokens; keys include the queries.")
    query_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    projections = 2 * shape.hidden * (2 * query_width + 2 * kv_width)
    ffn = 2 * shape.hidden * shape.ffn * shape.ffn_matrices
    # Query i of n, counted from 0, sees key_tokens - n + 1 + i keys.
    attended = query_tokens * key_tokens - query_tokens * (query_tokens - 1) // 2
    attention = 2 * 2 * query_width * attended
    head = 2 * shape.hidden * shape.vocab * scored_rows
    return shape.layers * (query_tokens * (projections + ffn) + attention) + head


def pair_cost(shape: ModelShape, tokens: PairTokens, *, share_prompt: bool = True) -> int:
    """Work of a training step on one pair, in forward passes: live tokens 3, frozen tokens 1.

    Activation checkpointing is not counted. A shared prompt is run once, live; both responses attend to it.

    Args:
        shape: The model.
        tokens: The pair after its draw.
        share_prompt: False: each back-propagated branch runs a prompt of its own, and so does a frozen one.
    """
    responses = (
        (tokens.chosen, tokens.chosen_scored, tokens.kept != "rejected"),
        (tokens.rejected, tokens.rejected_scored, tokens.kept != "chosen"),
    )
    total = 0
    if share_prompt:
        total += LIVE_PASSES * forward_flops(shape, query_tokens=tokens.prompt, key_tokens=tokens.prompt, scored_rows=0)
    for num_response, num_scored, is_live in responses:
        context = tokens.prompt + num_response
        forward = forward_flops(
            shape,
            query_tokens=num_response if share_prompt else context,
            key_tokens=context,
            scored_rows=num_scored,
        )
        total += (LIVE_PASSES if is_live else FROZEN_PASSES) * forward
    return total
