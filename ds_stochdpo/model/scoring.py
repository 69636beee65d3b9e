"""Log-probs of given tokens from hidden states, a chunk of rows at a time.

No tensor of [rows, vocab] larger than one chunk exists in forward or backward. Shape letters: K rows, D hidden,
V vocabulary. Entry: `chunked_logps`, `ScoringHead`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ScoringOptions:
    """How rows meet the head.

    Attributes:
        chunk_rows: Rows at once.
        recompute: Rebuild each chunk's softmax in the backward pass; False keeps all of them: K x V values.
        logit_scale: Factor on the logits.
        logit_softcap: c in c * tanh(logits / c); None: no cap.
    """

    chunk_rows: int = 256
    recompute: bool = True
    logit_scale: float = 1.0
    logit_softcap: float | None = None


class _ChunkedLogps(torch.autograd.Function):
    """d logp_k / d logits_k = onehot(target_k) - softmax(logits_k), chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, hidden_KD: Tensor, weight: Tensor, target_K: Tensor, options: ScoringOptions) -> Tensor:
        out_dtype = torch.promote_types(hidden_KD.dtype, torch.float32)
        logp_K = torch.empty(len(hidden_KD), dtype=out_dtype, device=hidden_KD.device)
        kept: list[Tensor] = []
        keeps = not options.recompute and any(ctx.needs_input_grad[:2])
        for rows in _chunks(len(hidden_KD), options.chunk_rows):
            logits = _logits(hidden_KD[rows], weight, options)
            log_norm = torch.logsumexp(logits, dim=-1, keepdim=True)
            logp_K[rows] = (logits.gather(-1, target_K[rows, None]) - log_norm).squeeze(-1)
            if keeps:
                kept.append(_slope(logits, log_norm, target_K[rows], options))
        ctx.options = options
        ctx.save_for_backward(hidden_KD, weight, target_K, *kept)
        return logp_K

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (grad_K,) = grads
        hidden_KD, weight, target_K, *kept = ctx.saved_tensors
        options: ScoringOptions = ctx.options
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden_KD) if wants_hidden else None
        # Chunks add up in fp32 even for 16-bit weights, or the sum would depend on the chunk count.
        grad_weight = torch.zeros_like(weight, dtype=grad_K.dtype) if wants_weight else None
        for i, rows in enumerate(_chunks(len(hidden_KD), options.chunk_rows)):
            if kept:
                slope = kept[i]
            else:
                logits = _logits(hidden_KD[rows], weight, options)
                log_norm = torch.logsumexp(logits, dim=-1, keepdim=True)
                slope = _slope(logits, log_norm, target_K[rows], options)
            slope = (slope * grad_K[rows, None]).to(hidden_KD.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = slope @ weight
            if grad_weight is not None:
                if grad_weight.dtype == slope.dtype:
                    grad_weight.addmm_(slope.T, hidden_KD[rows])
                else:
                    grad_weight += slope.T @ hidden_KD[rows]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


def _chunks(num_rows: int, chunk_rows: int) -> list[slice]:
    return [slice(i, min(i + chunk_rows, num_rows)) for i in range(0, num_rows, chunk_rows)]


def _logits(hidden_KD: Tensor, weight: Tensor, options: ScoringOptions) -> Tensor:
    """Logits of one chunk in at least fp32, scaled and capped."""
    # matmul, not F.linear: ZeRO-3 replaces F.linear for the whole process by a version that saves its inputs.
    logits = hidden_KD @ weight.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if options.logit_scale != 1.0:
        logits *= options.logit_scale
    if options.logit_softcap is not None:
        logits = logits.div_(options.logit_softcap).tanh_().mul_(options.logit_softcap)
    return logits


def _slope(logits: Tensor, log_norm: Tensor, target_K: Tensor, options: ScoringOptions) -> Tensor:
    """Slope of the log-probs of one chunk in hidden @ weight.T."""
    cap_slope = None
    if options.logit_softcap is not None:
        cap_slope = 1 - (logits / options.logit_softcap) ** 2
    slope = (logits - log_norm).exp_().neg_()
    slope.scatter_add_(-1, target_K[:, None], torch.ones_like(log_norm))
    if cap_slope is not None:
        slope *= cap_slope
    if options.logit_scale != 1.0:
        slope *= options.logit_scale
    return slope


def chunked_logps(hidden_KD: Tensor, weight: Tensor, target_K: Tensor, options: ScoringOptions) -> Tensor:
    """Log-prob of one target for each row: log softmax(head(hidden))[target].

    Args:
        hidden_KD: Final hidden states, after the last norm; carries gradient.
        weight: Head matrix [V, D]; carries gradient. Under ZeRO-3 call this inside the head's forward.
        target_K: Token of each row, int64 in [0, V).
        options: Chunk size, recomputation, scale and cap.

    Returns:
        Log-probs in nats [K], fp32 (fp64 for fp64 inputs). An impossible token gives -inf.

    Raises:
        IndexError or RuntimeError: From torch, if a target lies outside the vocabulary.

    Source: our derivation; the chunked cross entropy of arXiv:2411.09009 has the same memory shape.
    """
    return _ChunkedLogps.apply(hidden_KD, weight, target_K, options)


class ScoringHead(nn.Linear):
    """An output head that returns log-probs of chosen tokens instead of logits.

    A model's `lm_head` becomes one by setting its class, so its name and weight stay where they were. Both lanes are
    scored in one call, because under ZeRO-3 each call of a module gathers its weight.
    """

    scoring: ScoringOptions

    def forward(  # type: ignore[override]
        self, live_KD: Tensor, live_target_K: Tensor, frozen_KD: Tensor, frozen_target_K: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Score the rows of both lanes.

        Args:
            live_KD: Rows with gradient; may be empty.
            live_target_K: Their tokens.
            frozen_KD: Rows without gradient; may be empty.
            frozen_target_K: Their tokens.

        Returns:
            Log-probs of the live rows, with gradient, and of the frozen rows, without.
        """
        live_logp_K = chunked_logps(live_KD, self.weight, live_target_K, self.scoring)
        with torch.no_grad():
            frozen_logp_K = chunked_logps(frozen_KD, self.weight, frozen_target_K, self.scoring)
        return live_logp_K, frozen_logp_K
