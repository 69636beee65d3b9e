"""The attention seam: one function in transformers' registry, three backends behind it.

Every backend takes packed queries and keys with the boundaries of their segments and attends causally, aligned at the
last key of each segment (a segment with fewer queries than keys asks for its last rows). Shape letters: T packed
tokens, H heads, d head dim. Entry: `choose_backend`, `ATTENTION_NAME`.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_stochdpo.errors import ConfigError, ModelError
from ds_stochdpo.model.tiles import CausalTile, attend_in_tiles, causal_tiles, softcap_attention
from ds_stochdpo.packing.segments import AttentionSegments

logger = logging.getLogger(__name__)

ATTENTION_NAME = "ds_stochdpo_lanes"
MASK_ELEMENTS = 2**22
"""Largest mask tile of the sdpa backend, in elements: 4 MiB as bool, 16 MiB as the float mask SDPA makes of it."""

Backend = Callable[[Tensor, Tensor, Tensor, AttentionSegments, float, int | None, float | None], Tensor]
"""Takes query, key, value, segments, softmax scale, sliding window and soft cap; see `sdpa_backend`."""


@dataclass
class LaneCall:
    """What the attention of one layer has to know about the lane it runs for.

    Attributes:
        segments: Boundaries of the lane.
        backend: The kernel.
        capture_rows_C: Live rows whose keys and values the frozen lane will read; None: capture nothing.
        prompt_keys: Captured keys [1, H_kv, C, d], detached; read by the frozen lane.
        prompt_values: Captured values, same shape.
        is_open: Cleared after the first run, so that recomputation captures nothing.
    """

    segments: AttentionSegments
    backend: Backend
    capture_rows_C: Tensor | None = None
    prompt_keys: Tensor | None = None
    prompt_values: Tensor | None = None
    is_open: bool = field(default=True)


def lane_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    lane: LaneCall | None = None,
    **refused: Any,
) -> tuple[Tensor, None]:
    """Attention of one lane, in the form of transformers' attention registry.

    Args:
        module: The attention module; only its head dim is read.
        query: [1, H, T, d], after rotary embedding and norms.
        key: [1, H_kv, T, d].
        value: [1, H_kv, T, d].
        attention_mask: Must be None: boundaries come from `lane`.
        scaling: Softmax scale; None: d ** -0.5.
        dropout: Ignored; the project trains without dropout.
        sliding_window: Keys each query sees, itself included; None: all before it.
        softcap: c in c * tanh(score / c), before the softmax; None: no cap.
        lane: Boundaries, backend and captured prompt of this call.
        **refused: Score changes that would alter the result (sinks, position bias) are refused when set.

    Returns:
        Output [1, T, H, d] and None for the attention weights.

    Raises:
        ModelError: If the call comes from outside the two-lane forward, or asks for what the seam does not compute.
    """
    if lane is None:
        raise ModelError(
            "this model is in its two-lane training form; to generate or score with it, export it and load the export."
        )
    for name in ("s_aux", "position_bias", "head_mask"):
        if refused.get(name) is not None:
            raise ModelError(f"attention asks for {name}, which the two-lane attention does not compute.")
    if attention_mask is not None:
        raise ModelError("the two-lane attention got a mask; packed lanes are bounded by their segments alone.")
    if lane.capture_rows_C is not None and lane.is_open:
        lane.prompt_keys = key.detach().index_select(2, lane.capture_rows_C)
        lane.prompt_values = value.detach().index_select(2, lane.capture_rows_C)
    elif lane.prompt_keys is not None and lane.prompt_values is not None and lane.capture_rows_C is None:
        key = torch.cat([lane.prompt_keys, key], dim=2)
        value = torch.cat([lane.prompt_values, value], dim=2)
    if lane.segments.k_index is not None:
        key = key.index_select(2, lane.segments.k_index)
        value = value.index_select(2, lane.segments.k_index)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return lane.backend(query, key, value, lane.segments, scale, sliding_window, softcap), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, lane_attention)


def sdpa_backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: AttentionSegments,
    scale: float,
    window: int | None,
    softcap: float | None = None,
) -> Tensor:
    """Each segment through `scaled_dot_product_attention`, or an explicit softmax for capped scores.

    Any device and dtype.

    Args:
        query: [1, H, sum(q_lens), d].
        key: [1, H_kv, sum(k_lens), d].
        value: [1, H_kv, sum(k_lens), d].
        segments: Boundaries.
        scale: Softmax scale.
        window: Sliding window in keys, or None.
        softcap: Cap on the scores, or None.

    Returns:
        [1, sum(q_lens), H, d].
    """
    parts = zip(
        query.split(segments.q_lens, dim=2),
        key.split(segments.k_lens, dim=2),
        value.split(segments.k_lens, dim=2),
        strict=True,
    )
    if softcap is None:
        outputs = [_segment_sdpa(q, k, v, scale, window) for q, k, v in parts]
    else:
        outputs = [softcap_attention(q, k, v, scale, window, softcap) for q, k, v in parts]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return output.transpose(1, 2)


def _segment_sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    num_q, num_k = query.shape[2], key.shape[2]
    gqa = query.shape[1] != key.shape[1]
    if num_q == num_k and (window is None or window >= num_k):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=gqa)
    # is_causal aligns at the first key, so unequal lengths need a mask; tiles of queries keep it small.
    tile = max(1, MASK_ELEMENTS // num_k)
    tiles = causal_tiles(num_q, num_k, window, tile)
    # The mask of one tile is small; those of a long segment would add up to all its queries times all its keys.
    return attend_in_tiles(_masked_sdpa, tiles, query, key, value, scale, rebuild=len(tiles) > 1)


def _masked_sdpa(query: Tensor, key: Tensor, value: Tensor, tile: CausalTile, scale: float) -> Tensor:
    gqa = query.shape[1] != key.shape[1]
    mask = tile.mask(query.device)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=gqa)


def flash_backend(varlen_func: Callable[..., Tensor]) -> Backend:
    """Backend over `flash_attn.flash_attn_varlen_func`, or a function with its signature.

    Args:
        varlen_func: Takes q [T, H, d], k and v [T_k, H_kv, d], int32 `cu_seqlens_q` and `cu_seqlens_k`, Python ints
            `max_seqlen_q` and `max_seqlen_k`, `softmax_scale`, `causal`, `window_size` (left, right) and `softcap`
            (0: none).

    Returns:
        The backend; causal masks align at the last key, as flash-attn documents since 2.1.
    """

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        segments: AttentionSegments,
        scale: float,
        window: int | None,
        softcap: float | None = None,
    ) -> Tensor:
        output = varlen_func(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            cu_seqlens_q=segments.cu_seqlens_q,
            cu_seqlens_k=segments.cu_seqlens_k,
            max_seqlen_q=segments.max_seqlen_q,
            max_seqlen_k=segments.max_seqlen_k,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=0.0 if softcap is None else softcap,
        )
        return output[None]

    return attend


def torch_varlen_backend(varlen_attn: Callable[..., Any]) -> Backend:
    """Backend over `torch.nn.attention.varlen.varlen_attn`, or a function with its signature.

    Args:
        varlen_attn: Takes q, k, v as flash-attn does, then cu_seq_q, cu_seq_k, max_q, max_k, `scale`, `window_size`
            and `enable_gqa`; causal is window_size (-1, 0).

    Returns:
        The backend; it refuses a soft cap, which `varlen_attn` of torch 2.13 lacks.
    """

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        segments: AttentionSegments,
        scale: float,
        window: int | None,
        softcap: float | None = None,
    ) -> Tensor:
        if softcap is not None:
            raise ModelError(f"torch's varlen attention has no soft cap, and this model caps its scores at {softcap}.")
        output = varlen_attn(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            segments.cu_seqlens_q,
            segments.cu_seqlens_k,
            segments.max_seqlen_q,
            segments.max_seqlen_k,
            scale=scale,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output[None]

    return attend


def choose_backend(
    name: str, device: torch.device, dtype: torch.dtype, *, caps_attention: bool = False
) -> tuple[str, Backend]:
    """Decide once, at start, which kernel runs; the caller prints the name.

    Args:
        name: auto, flash_attn, torch or sdpa.
        device: Where the model runs.
        dtype: Dtype of its activations.
        caps_attention: The model's attention scores pass a soft cap.

    Returns:
        Name and backend.

    Raises:
        ConfigError: If a named backend cannot run here, or not this model.
    """
    half_on_cuda = device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)
    has_flash = importlib.util.find_spec("flash_attn") is not None
    if name == "auto":
        without_flash = "sdpa" if caps_attention else "torch"
        name = "sdpa" if not half_on_cuda else "flash_attn" if has_flash else without_flash
    if name == "sdpa":
        return name, sdpa_backend
    if not half_on_cuda:
        raise ConfigError(
            f"attn_implementation is {name}, whose kernels need a CUDA device and 16-bit activations; "
            f"here is {device.type} with {dtype}: use auto or sdpa, or set bf16: true on a GPU."
        )
    if name == "torch":
        if caps_attention:
            raise ConfigError(
                "attn_implementation is torch, whose varlen attention has no soft cap, and this model caps its "
                "attention scores; use flash_attn, sdpa or auto."
            )
        from torch.nn.attention.varlen import varlen_attn

        return name, torch_varlen_backend(varlen_attn)
    if not has_flash:
        raise ConfigError(
            "attn_implementation is flash_attn, but flash-attn is not installed; "
            "install the extra ds_stochdpo[flash], or use auto, torch or sdpa."
        )
    from flash_attn import flash_attn_varlen_func

    return name, flash_backend(flash_attn_varlen_func)
