"""Attention of one segment in tiles of queries: their masks, and an explicit softmax for capped scores.

Shape letters: H heads, Q queries of a tile, K keys, d head dim. Entry: `causal_tiles`, `attend_in_tiles`,
`softcap_attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

SCORE_ELEMENTS = 2**22
"""Largest tile of scores over all heads, in elements: 16 MiB in fp32."""


@dataclass(frozen=True)
class CausalTile:
    """Some queries of a segment and the keys that any of them sees; causal, aligned at the segment's last key.

    Attributes:
        queries: Rows of the segment's queries.
        keys: Rows of its keys.
        offset: Key that stands where the segment's first query stands.
        window: Keys each query sees, itself included; None: all before it.
    """

    queries: slice
    keys: slice
    offset: int
    window: int | None

    def mask(self, device: torch.device) -> Tensor:
        """[Q, K], true where a query sees a key."""
        query_pos = torch.arange(self.queries.start, self.queries.stop, device=device)[:, None] + self.offset
        key_pos = torch.arange(self.keys.start, self.keys.stop, device=device)[None, :]
        mask = key_pos <= query_pos
        if self.window is not None:
            mask &= key_pos > query_pos - self.window
        return mask


def causal_tiles(num_q: int, num_k: int, window: int | None, tile: int) -> list[CausalTile]:
    """Cut a segment into tiles of queries.

    Args:
        num_q: Queries of the segment.
        num_k: Keys of the segment, at least as many.
        window: Keys each query sees, itself included; None: all before it.
        tile: Queries at once.

    Returns:
        The tiles, in order.
    """
    offset = num_k - num_q
    tiles = []
    for start in range(0, num_q, tile):
        stop = min(start + tile, num_q)
        first_key = 0 if window is None else max(0, offset + start - window + 1)
        tiles.append(CausalTile(slice(start, stop), slice(first_key, offset + stop), offset, window))
    return tiles


def attend_in_tiles(
    attend: Callable[..., Tensor],
    tiles: Sequence[CausalTile],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    rebuild: bool,
) -> Tensor:
    """Attention of one segment, tile by tile.

    Args:
        attend: Takes query, key and value of a tile, the tile, and `args`; returns [1, H, Q, d].
        tiles: Tiles of the segment.
        query: [1, H, num_q, d].
        key: [1, H_kv, num_k, d].
        value: [1, H_kv, num_k, d].
        *args: Passed on.
        rebuild: Run each tile again in the backward pass instead of keeping its mask and scores. Memory then grows
            with the length of the segment and not with its square.

    Returns:
        [1, H, num_q, d].
    """
    queries = query.split([t.queries.stop - t.queries.start for t in tiles], dim=2)
    outputs = []
    for tile, part in zip(tiles, queries, strict=True):
        inputs = (part, key[:, :, tile.keys], value[:, :, tile.keys], tile, *args)
        if rebuild and torch.is_grad_enabled():
            outputs.append(checkpoint(attend, *inputs, use_reentrant=False, preserve_rng_state=False))
        else:
            outputs.append(attend(*inputs))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def softcap_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float
) -> Tensor:
    """Softmax attention of one segment over scores softcap * tanh(score / softcap).

    Scores and softmax are at least fp32.

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
    tiles = causal_tiles(num_q, num_k, window, tile)
    return attend_in_tiles(_capped_tile, tiles, query, key, value, scale, softcap, rebuild=True)


def _capped_tile(query: Tensor, key: Tensor, value: Tensor, tile: CausalTile, scale: float, softcap: float) -> Tensor:
    dtype = torch.promote_types(query.dtype, torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        return _capped_softmax(query, key.to(dtype), value.to(dtype), tile.mask(query.device), scale, softcap)


def _capped_softmax(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    # Query heads of one key head stand in a dimension of their own, so that keys are not repeated in memory.
    grouped = query.unflatten(1, (key.shape[1], -1))
    scores = grouped.to(key.dtype) @ key.unsqueeze(2).transpose(-1, -2)
    scores = torch.tanh(scores * (scale / softcap)) * softcap
    weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1)
    return (weights @ value.unsqueeze(2)).flatten(1, 2).to(query.dtype)
