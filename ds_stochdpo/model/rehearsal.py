"""A step on the meta device, where tensors have sizes and no memory: what a real one will hold at its peak.

Layers, head and autograd are those of training, so nothing about what they keep is written down a second time. Only
attention is replaced, by a kernel that keeps what a fused one does: queries, keys, values, output, and one number a
query and head. The `sdpa` form keeps masks as well, as torch's CPU kernel does.
Entry: `rehearse_lanes`, `rehearse_stock`; `TensorMeter` measures real steps as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_stochdpo.model.attention import Backend, flash_backend
from ds_stochdpo.model.scoring import ScoringOptions, chunked_logps
from ds_stochdpo.model.two_lane import TwoLaneModel
from ds_stochdpo.packing.lanes import LaneLayout
from ds_stochdpo.packing.segments import AttentionSegments

Kernel = Literal["flash", "sdpa"]
REHEARSAL_ATTENTION: dict[str, str] = {"flash": "ds_stochdpo_rehearsal", "sdpa": "ds_stochdpo_rehearsal_sdpa"}


class TensorMeter(TorchDispatchMode):
    """Bytes of the tensors that are made inside it and still alive, on any device, views counted once.

    What kernels and allocators take for themselves is not seen.

    Attributes:
        live_bytes: Now.
        peak_bytes: Most since the start or the last `restart`.
    """

    def __init__(self, module: nn.Module) -> None:
        """Watch everything but the parameters and buffers of `module`, which are there before."""
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        owned = [*module.parameters(), *module.buffers()]
        self._known: Any = weakref.WeakSet(tensor.untyped_storage() for tensor in owned)

    def restart(self) -> int:
        """Count the peak from now on; returns the one so far."""
        peak, self.peak_bytes = self.peak_bytes, self.live_bytes
        return peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and look at what it returns."""
        result = func(*args, **(kwargs or {}))
        for item in tree_iter(result):
            if not isinstance(item, Tensor):
                continue
            storage = item.untyped_storage()
            if storage not in self._known:
                self._known.add(storage)
                self.live_bytes += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return result

    def _free(self, num_bytes: int) -> None:
        self.live_bytes -= num_bytes


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one micro-batch beyond weights, optimizer and the gradients that are kept.

    Attributes:
        kept: What embedding and layers hold for the backward pass when the head begins.
        head: Most beside it while the head runs forward and backward: logits, and the gradient of its matrix.
        layers: Most beside it, before and after: the working set of a layer, and the gradients of its matrices.
    """

    kept: int
    head: int
    layers: int

    @property
    def peak(self) -> int:
        """The most at any time."""
        return self.kept + max(self.head, self.layers)


def measure_step(module: nn.Module, loss: Callable[[Callable[[Tensor], None]], Tensor]) -> StepMemory:
    """Memory of one forward and backward pass, on whatever device the module is.

    Gradients of parameters are dropped as soon as they are whole, for ZeRO shards them.

    Args:
        module: Its parameters and buffers are not counted.
        loss: Makes the forward pass and returns a scalar. It is given a function that it calls with the hidden states
            that go into the output head, when they do.

    Returns:
        The parts of the peak.
    """
    marks: dict[str, int] = {}
    with _GroupedProducts(), TensorMeter(module) as meter, _dropped_gradients(module):

        def head_ended(_: Tensor) -> None:
            marks["head"] = meter.restart()

        def head_begins(hidden: Tensor) -> None:
            marks["kept"], marks["forward"] = meter.live_bytes, meter.restart()
            if hidden.requires_grad:
                hidden.register_hook(head_ended)

        loss(head_begins).backward()
        last = meter.restart()
    kept = marks["kept"]
    layers = max(marks["forward"], last) - kept
    # Without a row to score nothing flows back through the head.
    return StepMemory(kept, max(0, marks.get("head", kept) - kept), max(0, layers))


class _GroupedProducts(TorchDispatchMode):
    """Products of experts in fp32 on the meta device, for which torch 2.13 has sizes in bf16 only."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.ops.aten._grouped_mm.default or not args[0].is_meta:
            return func(*args, **kwargs)
        left, right = args[:2]
        offsets = args[2] if len(args) > 2 else kwargs["offs"]
        # Rows by groups of matrices, or, for the gradient of the matrices, one product a group.
        groups = () if right.dim() == 3 else offsets.shape
        return left.new_empty((*groups, left.shape[-2], right.shape[-1]))


@contextmanager
def _dropped_gradients(module: nn.Module) -> Iterator[None]:
    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    hooks = [p.register_post_accumulate_grad_hook(drop) for p in module.parameters() if p.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def rehearse_lanes(model: TwoLaneModel, layout: LaneLayout) -> StepMemory:
    """Memory of one micro-batch in two lanes.

    Args:
        model: A two-lane model on the meta device, its backend `rehearsal_backend()`.
        layout: The micro-batch.

    Returns:
        The parts of the peak.
    """
    layout = layout.to("meta")
    return measure_step(model, lambda head_begins: lanes_logps(model, layout, head_begins).sum())


def lanes_logps(model: TwoLaneModel, layout: LaneLayout, head_begins: Callable[[Tensor], None]) -> Tensor:
    """Log-probs of the live rows, with a word when the head begins; for `measure_step`."""
    head = model.lm.get_output_embeddings()
    assert isinstance(head, nn.Module)
    hook = head.register_forward_pre_hook(lambda _, args: head_begins(args[0]))
    try:
        live_logp_K, _ = model(layout)
    finally:
        hook.remove()
    return live_logp_K


def rehearse_stock(
    lm: PreTrainedModel,
    *,
    rows: int,
    length: int,
    checkpointing: bool,
    kernel: Kernel = "flash",
    scored: int | None = None,
    scoring: ScoringOptions | None = None,
) -> StepMemory:
    """Memory of DPO on one padded batch of concatenated rows.

    Args:
        lm: A causal LM on the meta device; its attention is replaced and its dropout switched off for good.
        rows: Chosen and rejected rows together.
        length: Tokens of each, padding included.
        checkpointing: Layers are recomputed in the backward pass.
        kernel: See `rehearsal_backend`.
        scored: Tokens that meet a chunked head; None: logits of every row, cast to fp32 where they are not, and their
            log-softmax.
        scoring: Of the chunked head.

    Returns:
        The parts of the peak.
    """
    lm.config._attn_implementation = REHEARSAL_ATTENTION[kernel]
    lm.train()
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if checkpointing:
        lm.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    else:
        lm.activation_checkpointing_disable()
    ids = torch.zeros((rows, length), dtype=torch.long, device="meta")
    head: Any = lm.get_output_embeddings()

    def loss(head_begins: Callable[[Tensor], None]) -> Tensor:
        hidden = lm.base_model(input_ids=ids, use_cache=False).last_hidden_state
        if scored is None:
            head_begins(hidden)
            return head(hidden)[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None]).sum()
        index = torch.zeros(scored, dtype=torch.long, device="meta")
        hidden_KD = hidden.flatten(0, 1)[index]
        head_begins(hidden_KD)
        return chunked_logps(hidden_KD, head.weight, index, scoring or ScoringOptions()).sum()

    return measure_step(lm, loss)


def rehearsal_backend(kernel: Kernel = "flash") -> Backend:
    """An attention backend for the meta device.

    Args:
        kernel: `flash` has the memory of flash-attn's variable-length kernel, `sdpa` that of our sdpa backend on a CPU.
    """
    if kernel == "flash":
        return flash_backend(lambda query, key, value, **_: _FusedAttention.apply(query, key, value))
    return _segments_sdpa


def _segments_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: AttentionSegments,
    scale: float,
    window: int | None,
    softcap: float | None = None,
) -> Tensor:
    parts = zip(
        query.split(segments.q_lens, dim=2),
        key.split(segments.k_lens, dim=2),
        value.split(segments.k_lens, dim=2),
        strict=True,
    )
    outputs = [_cpu_kernel(q, k, v, needs_mask=q.shape[2] != k.shape[2]) for q, k, v in parts]
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _cpu_kernel(query: Tensor, key: Tensor, value: Tensor, *, needs_mask: bool) -> Tensor:
    """Torch's CPU kernel by its own name, for on the meta device its public one takes the unfused way."""
    # Made anew in each layer, for torch turns boolean masks into numbers in each call.
    mask = query.new_zeros(query.shape[0], 1, query.shape[2], key.shape[2]) if needs_mask else None
    attend: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output: Tensor = attend(query, key, value, 0.0, not needs_mask, attn_mask=mask)[0]
    return output


class _FusedAttention(torch.autograd.Function):
    """Allocates and keeps what a fused kernel does, and computes nothing; q, k, v are [T, H, d] or [B, T, H, d]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query)
        log_norm = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, log_norm)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _padded_flash(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    return _FusedAttention.apply(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)), None


def _padded_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    # As transformers does where there is a mask.
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return _cpu_kernel(query, key, value, needs_mask=True).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(REHEARSAL_ATTENTION["flash"], _padded_flash)
ALL_ATTENTION_FUNCTIONS.register(REHEARSAL_ATTENTION["sdpa"], _padded_sdpa)
