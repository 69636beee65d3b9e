"""Explicit-softmax stand-ins with the signatures of the varlen kernels; they record every call they get."""

import inspect
from dataclasses import dataclass, field

import torch


def explicit_attention(q, k, v, scale, window, counts, softcap=0.0):
    """Softmax attention of one segment [T, H, d], causal and aligned at the last key.

    `window` is (left, right) as in flash-attn: a query at key j sees keys j - left to j + right; -1 is no bound.
    `softcap` bounds the scaled scores; 0 is none.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    num_q, num_k = len(q), len(k)
    assert 1 <= num_q <= num_k, "a segment has queries, and at least as many keys"
    own_key = torch.arange(num_k - num_q, num_k, device=q.device)[:, None]
    distance = own_key - torch.arange(num_k, device=q.device)
    is_seen = torch.ones(num_q, num_k, dtype=torch.bool, device=q.device)
    if window[0] >= 0:
        is_seen &= distance <= window[0]
    if window[1] >= 0:
        is_seen &= distance >= -window[1]
    counts += is_seen.sum(1).tolist()
    scores = scale * torch.einsum("qhd,khd->hqk", q, k)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.softmax(scores.masked_fill(~is_seen, -torch.inf), dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def check_boundaries(cu_seqlens, max_seqlen, num_tokens):
    """What the CUDA kernels take for granted about the boundaries of one side."""
    assert isinstance(cu_seqlens, torch.Tensor)
    assert cu_seqlens.dtype == torch.int32
    assert cu_seqlens.is_contiguous()
    assert cu_seqlens[0] == 0
    assert cu_seqlens[-1] == num_tokens
    assert (cu_seqlens.diff() > 0).all(), "an empty segment reached the kernel"
    assert type(max_seqlen) is int
    assert max_seqlen == cu_seqlens.diff().max()


def attend(q, k, v, cu_q, cu_k, max_q, max_k, scale, window, softcap=0.0):
    """The packed output, and how many keys each query saw."""
    check_boundaries(cu_q, max_q, len(q))
    check_boundaries(cu_k, max_k, len(k))
    assert len(cu_q) == len(cu_k)
    assert q.ndim == k.ndim == v.ndim == 3
    assert k.shape == v.shape
    assert q.shape[2] == k.shape[2]
    assert q.shape[1] % k.shape[1] == 0
    assert q.dtype == k.dtype == v.dtype
    assert type(scale) is float
    counts = []
    parts = [
        explicit_attention(q[cu_q[i] : cu_q[i + 1]], k[cu_k[i] : cu_k[i + 1]], v[cu_k[i] : cu_k[i + 1]],
                           scale, window, counts, softcap)
        for i in range(len(cu_q) - 1)
    ]  # fmt: skip
    return torch.cat(parts), counts


@dataclass
class VarlenCall:
    """Arguments of one kernel call, and the keys each query saw."""

    q_shape: tuple
    k_shape: tuple
    q_lens: list
    k_lens: list
    scale: float
    window: tuple
    has_grad: bool
    enable_gqa: bool | None = None
    key_counts: list = field(default_factory=list)
    softcap: float = 0.0


class Spy:
    """Base of the two spies: remembers the calls."""

    def __init__(self):
        self.calls = []

    def run(self, q, k, v, cu_q, cu_k, max_q, max_k, scale, window, kernel_window, enable_gqa=None,
            softcap=0.0):  # fmt: skip
        output, counts = attend(q, k, v, cu_q, cu_k, max_q, max_k, scale, window, softcap)
        lens = [c.diff().tolist() for c in (cu_q, cu_k)]
        self.calls.append(
            VarlenCall(tuple(q.shape), tuple(k.shape), *lens, scale, kernel_window, output.requires_grad,
                       enable_gqa, counts, softcap)
        )  # fmt: skip
        return output


class FlashSpy(Spy):
    """`flash_attn.flash_attn_varlen_func` (2.8), argument for argument."""

    def __call__(
        self,
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        block_table=None,
    ):
        assert causal is True
        assert dropout_p == 0.0
        assert type(softcap) is float
        assert alibi_slopes is None
        assert block_table is None
        assert return_attn_probs is False
        assert type(window_size) is tuple
        assert all(type(w) is int for w in window_size)
        # causal closes the right side whatever the window says.
        window = (window_size[0], 0)
        return self.run(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale,
                        window, window_size, softcap=softcap)  # fmt: skip


class TorchVarlenSpy(Spy):
    """`torch.nn.attention.varlen.varlen_attn` (2.13), each argument; causal is a right window of 0."""

    def __call__(
        self,
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        *,
        return_aux=None,
        scale=None,
        window_size=(-1, -1),
        enable_gqa=False,
        seqused_k=None,
        block_table=None,
        num_splits=None,
    ):
        assert return_aux is None
        assert seqused_k is None
        assert block_table is None
        assert enable_gqa or query.shape[1] == key.shape[1], "torch wants to be told about grouped heads"
        return self.run(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size, window_size,
                        enable_gqa)  # fmt: skip


def parameters_of(function):
    """(name, default) of each parameter, `self` left out."""
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]
