"""Saved layer inputs in host memory between the forward and the backward pass. Entry: `HostOffload`."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor


class Mover(Protocol):
    """Copies tensors off a device and back, beside its computations."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """Start copying to the host; the device memory may be reused once the copy has ended."""

    def to_device(self, host: Tensor) -> Tensor:
        """Start copying back."""

    def wait(self, tensor: Tensor) -> None:
        """Let computations started from now on wait for copies back; `tensor` is one of them."""


class CudaMover:
    """Pinned host memory and a stream for copies.

    torch keeps freed pinned buffers for later steps. All copies run on one stream, so a copy back never starts before
    the same tensor has left.
    """

    def __init__(self, device: torch.device) -> None:
        """Make the stream.

        Args:
            device: A CUDA device.
        """
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def to_host(self, tensor: Tensor) -> Tensor:
        """See `Mover`."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self.stream)
        return host

    def to_device(self, host: Tensor) -> Tensor:
        """See `Mover`."""
        with torch.cuda.stream(self.stream):
            return host.to(self.device, non_blocking=True)

    def wait(self, tensor: Tensor) -> None:
        """See `Mover`."""
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.stream)
        tensor.record_stream(current)


class _Parcel:
    """One saved tensor on the host; knows the one saved before it, which the backward pass asks for next."""

    def __init__(self, tensor: Tensor, mover: Mover, before: _Parcel | None) -> None:
        self.mover = mover
        self.host = mover.to_host(tensor)
        self.on_way: Tensor | None = None
        self.before = None if before is None else weakref.ref(before)

    def fetch(self) -> None:
        if self.on_way is None:
            self.on_way = self.mover.to_device(self.host)

    def take(self) -> Tensor:
        self.fetch()
        tensor, self.on_way = self.on_way, None
        assert tensor is not None
        self.mover.wait(tensor)
        before = None if self.before is None else self.before()
        if before is not None:
            before.fetch()
        return tensor


class HostOffload:
    """Moves what checkpointed layers save to the host, and brings it back one layer ahead of the backward pass.

    On a device that is itself the host (the CPU) it changes nothing.
    """

    def __init__(self, mover: Mover | None = None) -> None:
        """Start without a mover for the device of the first tensor to choose one.

        Args:
            mover: How to copy; None: `CudaMover` on CUDA devices, nothing on others.
        """
        self.mover = mover
        self._last: weakref.ref[_Parcel] | None = None

    def saving(self, tensor: Tensor) -> AbstractContextManager[object]:
        """Context in which tensors that autograd saves go to the host.

        Args:
            tensor: One of them; its device decides.

        Returns:
            The context; enter it around `torch.utils.checkpoint.checkpoint`, whose own inner hooks keep it from what
            the layer saves while it is recomputed.
        """
        if self.mover is None and tensor.is_cuda:
            self.mover = CudaMover(tensor.device)
        if self.mover is None:
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | _Parcel:
        if not tensor.numel():
            return tensor
        assert self.mover is not None
        parcel = _Parcel(tensor.detach(), self.mover, self._last() if self._last else None)
        self._last = weakref.ref(parcel)
        return parcel

    @staticmethod
    def _unpack(saved: Tensor | _Parcel) -> Tensor:
        return saved if isinstance(saved, Tensor) else saved.take()
