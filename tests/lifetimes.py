"""How many bytes of tensors are alive at once, counted storage by storage from first use to release."""

from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass
class Storage:
    """One piece of memory: its size, and the operation and shape it was first seen with."""

    ref: StorageWeakRef
    nbytes: int
    origin: str
    shape: tuple


class Lifetimes(TorchDispatchMode):
    """Inside the block, everything that operations make is followed until it is released; what was there is not.

    Attributes:
        peak: Most bytes alive at once.
        at_peak: The storages of that moment.
        shapes: Every shape that an operation returned.
    """

    def __init__(self, ignore=()):
        super().__init__()
        self.ignored = {t.untyped_storage()._cdata for t in ignore}
        self.alive, self.peak, self.at_peak, self.shapes = {}, 0, [], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # What an operation reads for the first time was there before the block.
        for tensor in tensors((args, kwargs)):
            if tensor.untyped_storage()._cdata not in self.alive:
                self.ignored.add(tensor.untyped_storage()._cdata)
        result = func(*args, **(kwargs or {}))
        self.alive = {key: s for key, s in self.alive.items() if not s.ref.expired()}
        for tensor in tensors(result):
            storage = tensor.untyped_storage()
            self.shapes.add(tuple(tensor.shape))
            if storage._cdata not in self.ignored and storage._cdata not in self.alive:
                ref = StorageWeakRef(storage)
                self.alive[ref.cdata] = Storage(ref, storage.nbytes(), str(func), tuple(tensor.shape))
        total = sum(s.nbytes for s in self.alive.values())
        if total > self.peak:
            self.peak, self.at_peak = total, list(self.alive.values())
        return result


def tensors(tree):
    """All tensors in nested arguments or results."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
