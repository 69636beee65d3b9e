"""Attention of one segment in tiles of queries: their masks, and an explicit softmax for capped scores.

Shape letters: H heads, Q queries of a tile, K keys, d head dim. Entry: `causal_tiles`, `softcap_attention`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

SCORE_ELEMENTS = 2**22
"""Largest tile of scores over all heads, in elements: 16 MiB in fp32."""


def causal_tiles(
    num_q: int, num_k: int, window: int | None, tile: int, device: torch.device
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Tiles of a causal mask that is aligned at the last key.

    Args:
        num_q: Queries of the segment.
        num_k: Keys of the segment, at least as many.
        window: Keys each query sees, itself included; None: all before it.
        tile: Queries at once.
        device: Where the masks go.

    Yields:
        Queries of the tile, the keys that any of them sees, and their mask [Q, K], true where a query sees a key.
    """
    for start in range(0, num_q, tile):
        stop = min(start + tile, num_q)
        first_key = 0 if window is None else max(0, num_k - num_q + start - window + 1)
        last_key = num_k - num_q + stop
        query_pos = torch.arange(num_k - num_q + start, last_key, device=device)[:, None]
        key_pos = torch.arange(first_key, last_key, device=device)[None, :]
        mask = key_pos <= query_pos
        if window is not None:
            mask &= key_pos > query_pos - window
        yield slice(start, stop), slice(first_key, last_key), mask


def softcap_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float
) -> Tensor:
    """Softmax attention of one segment over scores softcap * tanh(score / softcap).

    Scores and softmax are at least fp32. A tile's scores are rebuilt in the backward pass, so memory grows with the
    length of a segment and not with its square.

    Args:
        query: [1, H, num_q, d].
        key: [1, H_kv, num_k, d].
        value: [1, H_kv, num_k, d].
        scale: Factor on the scores, before the cap.
        window: Sliding window in keys, or None.
        softcap: Largest score.

    Returns:
        [1, H, num_q, d].

    Source: the score cap of Gemma 2, arXiv:2408.00118 section 2.
    """
    num_q, num_k = query.shape[2], key.shape[2]
    tile = max(1, SCORE_ELEMENTS // (query.shape[1] * num_k))
    outputs = []
    for queries, keys, mask in causal_tiles(num_q, num_k, window, tile, query.device):
        inputs = (query[:, :, queries], key[:, :, keys], value[:, :, keys], mask, scale, softcap)
        if torch.is_grad_enabled():
            outputs.append(checkpoint(_capped_tile, *inputs, use_reentrant=False, preserve_rng_state=False))
        else:
            outputs.append(_capped_tile(*inputs))
    return torch.cat(outputs, dim=2)


def _capped_tile(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    dtype = torch.promote_types(query.dtype, torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        return _capped_softmax(query, key.to(dtype), value.to(dtype), mask, scale, softcap)


def _capped_softmax(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    # Query heads of one key head stand in a dimension of their own, so that keys are not repeated in memory.
    grouped = query.unflatten(1, (key.shape[1], -1))
    scores = grouped.to(key.dtype) @ key.unsqueeze(2).transpose(-1, -2)
    scores = torch.tanh(scores * (scale / softcap)) * softcap
    weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1)
    return (weights @ value.unsqueeze(2)).flatten(1, 2).to(query.dtype)
