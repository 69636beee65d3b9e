"""Peak memory of a step beyond weights, gradients and optimizer state, and its work.

Entry: `measure_memory`, which runs a variant in a process of its own.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import resource
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from benchmarking.variants import Bench, BenchVariant
from benchmarking.workload import Workload
from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.model.rehearsal import TensorMeter
from ds_stochdpo.pruning.counter import count_flops

MIB = 2**20


@dataclass(frozen=True)
class MemoryFigures:
    """What one variant needs, in MiB, and its work.

    Attributes:
        peak_mib: Peak over all turns beyond what is held before a step (weights, gradients, optimizer state): of the
            resident set on CPU, of allocations on a GPU.
        live_mib: Tensors of the step that live at once (`TensorMeter`), most over all turns.
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
    transformers_logging.disable_progress_bar()
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
        with TensorMeter(bench.module(variant)) as meter:
            bench.step(variant, pairs, turn)
        live_mib = max(live_mib, meter.peak_bytes / MIB)
        # Apart: a second mode around a checkpointed layer keeps more of it alive.
        with count_flops() as counter:
            bench.step(variant, pairs, turn)
        flops.append(counter.get_total_flops())
    pipe.send(asdict(MemoryFigures(peak, live_mib, flops)))


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
