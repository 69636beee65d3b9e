"""Peak memory of a step beyond weights, gradients and optimizer state, and its work.

Entry: `measure_memory`, which runs a variant in a process of its own.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import resource
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from benchmarking.variants import Bench, BenchVariant
from benchmarking.workload import Workload
from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.pruning.counter import count_flops

MIB = 2**20


@dataclass(frozen=True)
class MemoryFigures:
    """What one variant needs, in MiB, and its work.

    Attributes:
        peak_mib: Peak over all turns beyond what is held before a step (weights, gradients, optimizer state): of the
            resident set on CPU, of allocations on a GPU.
        live_mib: Tensors of the step that live at once (`LiveBytes`), most over all turns.
        flops: Floating-point operations of each turn, forward and backward, by torch's counter.
    """

    peak_mib: float
    live_mib: float
    flops: list[int]


def measure_memory(
    variant: BenchVariant, workload: Workload, config: StochDPOConfig, num_layers: int, turns: list[int]
) -> MemoryFigures:
    """Run a variant's steps in a fresh process, so that nothing of another variant is in its memory."""
    # The server has only imported things when it forks, so a child starts at once and has a heap of its own.
    fresh = multiprocessing.get_context("forkserver")
    fresh.set_forkserver_preload(["benchmarking.memory"])
    ours, theirs = fresh.Pipe()
    process = fresh.Process(target=_work, args=(theirs, variant, workload, config, num_layers, turns), daemon=True)
    process.start()
    theirs.close()
    try:
        return MemoryFigures(**ours.recv())
    except EOFError:
        raise RuntimeError(f"the process of variant {variant.name} ended early; its message is above.") from None
    finally:
        process.join(timeout=30)


def _work(
    pipe: Any, variant: BenchVariant, workload: Workload, config: StochDPOConfig, num_layers: int, turns: list[int]
) -> None:
    bench = Bench(config, num_layers, (variant.form,))
    pairs = workload.pairs[: variant.num_pairs]
    # The first step makes gradients and optimizer state, which are no part of a variant's own memory.
    bench.step(variant, pairs[:1], turns[0])
    base = peak_memory_mib(bench.device, restart=True)
    for turn in turns:
        bench.step(variant, pairs, turn)
    peak = peak_memory_mib(bench.device) - base
    live_mib, flops = 0.0, []
    for turn in turns:
        with count_flops() as counter, LiveBytes() as live:
            bench.step(variant, pairs, turn)
        live_mib = max(live_mib, live.peak / MIB)
        flops.append(counter.get_total_flops())
    pipe.send(asdict(MemoryFigures(peak, live_mib, flops)))


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages made inside its context that are alive: kept for the backward pass, or temporary.

    Deterministic, whatever the allocator does. Work buffers inside one operator are not seen.

    Attributes:
        peak: Most bytes alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._alive = 0
        self._known = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator; storages of its inputs are older, those of its outputs may be new."""
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            self._known.setdefault(tensor.untyped_storage(), 0)
        output = func(*args, **kwargs)
        for tensor in _tensors(output):
            storage = tensor.untyped_storage()
            if storage not in self._known:
                size = storage.nbytes()
                self._known[storage] = size
                self._alive += size
                self.peak = max(self.peak, self._alive)
                weakref.finalize(storage, self._release, size)
        return output

    def _release(self, size: int) -> None:
        self._alive -= size


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def peak_memory_mib(device: torch.device, *, restart: bool = False) -> float:
    """Peak memory so far; with `restart` the memory in use now, from which peaks count again."""
    if device.type == "cuda":
        if restart:
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated() / MIB
        return torch.cuda.max_memory_allocated() / MIB
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    if restart:
        # What the allocator holds back of earlier work would hide that much of the peak.
        ctypes.CDLL(None).malloc_trim(0)
        # 5 resets the peak resident set size of the process (proc(5)).
        Path("/proc/self/clear_refs").write_text("5")
    field = "VmRSS:" if restart else "VmHWM:"
    line = next(row for row in status.read_text().splitlines() if row.startswith(field))
    return int(line.split()[1]) / 2**10
