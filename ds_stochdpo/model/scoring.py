"""Log-probs of given tokens from hidden states, a tile of rows and vocabulary at a time.

No tensor of [rows, vocab] larger than one tile exists in forward or backward, so memory grows neither with the rows nor
with the vocabulary. Shape letters: K rows, R rows of one chunk, D hidden, V vocabulary. Entry: `chunked_logps`,
`ScoringHead`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ds_stochdpo.pruning.memory import VOCAB_TILE


@dataclass(frozen=True)
class ScoringOptions:
    """How rows meet the head.

    Attributes:
        chunk_rows: Rows at once.
        recompute: Rebuild each tile's softmax in the backward pass; False keeps all of them, K x V values in the
            dtype of the hidden states, and cuts tiles by rows alone.
        logit_scale: Factor on the logits.
        logit_softcap: c in c * tanh(logits / c); None: no cap.
    """

    chunk_rows: int = 256
    recompute: bool = True
    logit_scale: float = 1.0
    logit_softcap: float | None = None


class _ChunkedLogps(torch.autograd.Function):
    """d logp_k / d logits_k = onehot(target_k) - softmax(logits_k), tile by tile."""

    @staticmethod
    def forward(ctx: Any, hidden_KD: Tensor, weight: Tensor, target_K: Tensor, options: ScoringOptions) -> Tensor:
        # Each tile of the vocabulary looks for targets inside itself; one that is in no tile is refused here.
        weight.detach()[:, 0].index_select(0, target_K)
        keeps = not options.recompute and any(ctx.needs_input_grad[:2])
        out_dtype = torch.promote_types(hidden_KD.dtype, torch.float32)
        logp_K = torch.empty(len(hidden_KD), dtype=out_dtype, device=hidden_KD.device)
        log_norm_K = torch.empty_like(logp_K)
        kept: list[Tensor] = []
        for rows in _even_tiles(len(hidden_KD), options.chunk_rows):
            if keeps:
                logp_K[rows], slope = _whole_rows(hidden_KD[rows], weight, target_K[rows], options)
                kept.append(slope.to(hidden_KD.dtype))
                continue
            logit_R = torch.full_like(logp_K[rows], -torch.inf)
            log_norm_R = logit_R.clone()
            for vocab in _tiles(len(weight), VOCAB_TILE):
                logits = _logits(hidden_KD[rows], weight[vocab], options)
                index, is_inside = _inside(target_K[rows], vocab)
                logit_R = torch.where(is_inside, logits.gather(-1, index).squeeze(-1), logit_R)
                log_norm_R = torch.logaddexp(log_norm_R, torch.logsumexp(logits, dim=-1))
            logp_K[rows] = logit_R - log_norm_R
            log_norm_K[rows] = log_norm_R
        ctx.options = options
        ctx.save_for_backward(hidden_KD, weight, target_K, log_norm_K, *kept)
        return logp_K

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (grad_K,) = grads
        hidden_KD, weight, target_K, log_norm_K, *kept = ctx.saved_tensors
        options: ScoringOptions = ctx.options
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden_KD) if wants_hidden else None
        # Tiles add up in fp32 even for 16-bit weights, or the sum would depend on their number.
        grad_weight = torch.zeros_like(weight, dtype=grad_K.dtype) if wants_weight else None
        for i, rows in enumerate(_even_tiles(len(hidden_KD), options.chunk_rows)):
            hidden_RD, factor = hidden_KD[rows], grad_K[rows, None]
            # The incoming gradient goes to rows of the width of the model, not to those of the vocabulary.
            scaled_RD = (hidden_RD * factor).to(hidden_KD.dtype)
            grad_RD = torch.zeros_like(hidden_RD, dtype=grad_K.dtype)
            for vocab in _tiles(len(weight), len(weight) if kept else VOCAB_TILE):
                if kept:
                    slope = kept[i]
                else:
                    logits = _logits(hidden_RD, weight[vocab], options)
                    slope = _slope(logits, log_norm_K[rows], target_K[rows], vocab, options).to(hidden_KD.dtype)
                if wants_hidden:
                    _add_product(grad_RD, slope, weight[vocab])
                if grad_weight is not None:
                    _add_product(grad_weight[vocab], slope.T, scaled_RD)
            if grad_hidden is not None:
                grad_hidden[rows] = grad_RD.mul_(factor)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


def _tiles(length: int, tile: int) -> list[slice]:
    return [slice(i, min(i + tile, length)) for i in range(0, length, tile)]


def _even_tiles(length: int, most: int) -> list[slice]:
    """As few tiles as `most` allows, alike in length: a short last one would read all of the head for a few rows."""
    count = -(-length // most)
    edges = [length * i // count for i in range(count + 1)] if count else []
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


def _inside(target_R: Tensor, vocab: slice) -> tuple[Tensor, Tensor]:
    """Column of each target in a tile of the vocabulary [R, 1], any column for others, and which are inside [R]."""
    is_inside = (target_R >= vocab.start) & (target_R < vocab.stop)
    return (target_R.clamp(vocab.start, vocab.stop - 1) - vocab.start)[:, None], is_inside


def _logits(hidden_RD: Tensor, weight: Tensor, options: ScoringOptions) -> Tensor:
    """Logits of one tile in at least fp32, scaled and capped."""
    # matmul, not F.linear: ZeRO-3 replaces F.linear for the whole process by a version that saves its inputs.
    logits = hidden_RD @ weight.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if options.logit_scale != 1.0:
        logits *= options.logit_scale
    if options.logit_softcap is not None:
        logits = logits.div_(options.logit_softcap).tanh_().mul_(options.logit_softcap)
    return logits


def _slope(logits: Tensor, log_norm_R: Tensor, target_R: Tensor, vocab: slice, options: ScoringOptions) -> Tensor:
    """Slope of the log-probs of one tile in hidden @ weight.T, in the memory of `logits`."""
    factor = _cap_slope(logits, options)
    index, is_inside = _inside(target_R, vocab)
    slope = logits.sub_(log_norm_R[:, None]).exp_().neg_()
    slope.scatter_add_(-1, index, is_inside[:, None].to(slope.dtype))
    return slope if factor is None else slope.mul_(factor)


def _whole_rows(hidden_RD: Tensor, weight: Tensor, target_R: Tensor, options: ScoringOptions) -> tuple[Tensor, Tensor]:
    """Log-probs of some rows and their slope in hidden @ weight.T [R, V], for a backward pass that rebuilds nothing."""
    logits = _logits(hidden_RD, weight, options)
    factor = _cap_slope(logits, options)
    log_probs = logits.log_softmax(-1)
    index = target_R[:, None]
    logp_R = log_probs.gather(-1, index).squeeze(-1)
    slope = log_probs.exp_().neg_()
    slope.scatter_add_(-1, index, torch.ones_like(index, dtype=slope.dtype))
    return logp_R, slope if factor is None else slope.mul_(factor)


def _cap_slope(logits: Tensor, options: ScoringOptions) -> Tensor | float | None:
    """Slope of scaled and capped logits in the plain ones; None: 1."""
    if options.logit_softcap is not None:
        return (1 - (logits / options.logit_softcap) ** 2) * options.logit_scale
    return options.logit_scale if options.logit_scale != 1.0 else None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


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
