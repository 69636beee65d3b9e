"""From measurements to the JSON record and the printed table. Entry: `workload_record`, `run_facts`, `table`."""

from __future__ import annotations

import dataclasses
import os
import platform
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarking.memory import MemoryFigures
from benchmarking.timing import Ratio, Rounds, ratio
from benchmarking.variants import BenchVariant
from benchmarking.workload import Workload
from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.job import commit, versions
from ds_stochdpo.packing import pair_lengths
from ds_stochdpo.pruning import ModelShape
from ds_stochdpo.pruning.work import StepWork, expected_step_work

FORMAT = 1
TITLE = 70
SCHEMA = Path(__file__).with_name("record.schema.json")
COMPARED = (
    ("packed", "packed_single"),
    ("packed+ckpt", "packed_single+ckpt"),
    ("exact", "single"),
    ("trl_compact", "exact"),
    ("trl_compact", "all"),
)
"""Pairs of variants that get a line of their own where both were measured, beside the comparison with the baseline."""


def run_facts(config: StochDPOConfig, num_layers: int, num_rounds: int, device: torch.device) -> dict[str, Any]:
    """What the figures rest on: versions, machine, settings."""
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else None
    return {
        "format": FORMAT,
        "commit": commit(),
        "versions": versions(),
        "machine": {
            "device": gpu or "cpu",
            "processor": platform.processor() or platform.machine(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        },
        "threads": torch.get_num_threads(),
        "dtype": "bfloat16" if gpu else "float32",
        "model_layers": num_layers,
        "rounds": num_rounds,
        "settings": config.to_dict(),
    }


def workload_record(
    workload: Workload,
    variants: Mapping[str, BenchVariant],
    rounds: Mapping[str, Rounds],
    memory: Mapping[str, MemoryFigures],
    shape: ModelShape,
    peers: Mapping[str, str],
) -> dict[str, Any]:
    """Figures of one batch.

    Args:
        workload: The batch.
        variants: What was measured, by name.
        rounds: Their seconds, and those of the peers.
        memory: Their memory, where it was measured.
        shape: The model.
        peers: Titles of the peers, by name.
    """
    work = {name: expected_work(variant, workload, shape) for name, variant in variants.items()}
    names = list(rounds)
    baseline = "stock" if "stock" in names else names[0]
    base = memory.get(baseline)

    def row(name: str) -> dict[str, Any]:
        variant = variants.get(name)
        seconds = [s for turns in rounds[name] for s in turns]
        figures: dict[str, Any] = {
            "name": name,
            "title": variant.title if variant else peers[name],
            "pairs": variant.num_pairs if variant else len(workload.pairs),
            "seconds": rounds[name],
            "step_s": {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)},
            "work": dataclasses.asdict(work[name]) | {"total": work[name].total} if variant else None,
            "memory": dataclasses.asdict(memory[name]) if name in memory else None,
            "peak_of_baseline": memory[name].peak_mib / base.peak_mib if name in memory and base else None,
        }
        return figures

    compared = [(baseline, n) for n in names if n != baseline]
    compared += [(n, f) for n, f in COMPARED if n in names and f in names and n != baseline]
    return {
        "workload": workload.facts(),
        "baseline": baseline,
        "variants": [row(name) for name in names],
        "ratios": [_ratio_row(slow, fast, variants, rounds, work) for slow, fast in compared],
    }


def _ratio_row(
    slow: str,
    fast: str,
    variants: Mapping[str, BenchVariant],
    rounds: Mapping[str, Rounds],
    work: Mapping[str, StepWork],
) -> dict[str, Any]:
    measured: Ratio = ratio(rounds[slow], rounds[fast])
    is_sampled = any(n in variants and variants[n].is_sampled for n in (slow, fast))
    faster = measured.mean if is_sampled else measured.median
    predicted = work[slow].total / work[fast].total if slow in work and fast in work else None
    return {
        "slow": slow,
        "fast": fast,
        "faster": faster,
        "rule": "mean over draws" if is_sampled else "median of rounds",
        **dataclasses.asdict(measured),
        "predicted": predicted,
        "of_predicted": faster / predicted if predicted else None,
    }


def expected_work(variant: BenchVariant, workload: Workload, shape: ModelShape) -> StepWork:
    """Mean work of a step over the draws, as the estimator predicts it."""
    lengths = [pair_lengths(pair) for pair in workload.pairs[: variant.num_pairs]]
    return expected_step_work(shape, lengths, variant.work)


def table(record: Mapping[str, Any]) -> Iterator[str]:
    """The lines of one batch for people."""
    facts = record["workload"]
    longest = max(prompt + max(chosen, rejected) for prompt, chosen, rejected in facts["lengths"])
    yield f"{facts['name']}: {facts['pairs']} pairs, longest row {longest} tokens"
    of_base = "of stock" if record["baseline"] == "stock" else "of first"
    columns = (("step, s", 9), ("range", 15), ("faster", 9), ("of FLOP ratio", 15), ("peak, MiB", 11), (of_base, 10))
    yield f"  {'':{TITLE}s}" + "".join(f"{title:>{width}s}" for title, width in columns)
    against_baseline = {r["fast"]: r for r in record["ratios"] if r["slow"] == record["baseline"]}
    for row in record["variants"]:
        step, faster, memory = row["step_s"], against_baseline.get(row["name"]), row["memory"]
        spread = f"{step['min']:.2f}-{step['max']:.2f}"
        gain = f"{faster['faster']:8.2f}x" if faster else " " * 9
        share = f"{faster['of_predicted']:15.2f}" if faster and faster["of_predicted"] else " " * 15
        peak = f"{memory['peak_mib']:11.0f}" if memory else ""
        share_of_base = f"{row['peak_of_baseline']:9.2f}x" if row["peak_of_baseline"] else ""
        yield f"  {row['title']:{TITLE}s}{step['median']:9.2f}{spread:>15s}{gain}{share}{peak}{share_of_base}".rstrip()
    for row in record["ratios"]:
        if (row["slow"], row["fast"]) in COMPARED:
            expected = f", FLOP ratio {row['predicted']:.2f}" if row["predicted"] else ""
            yield (
                f"  {row['slow']} / {row['fast']}: {row['faster']:.2f}x "
                f"(rounds {row['low']:.2f}-{row['high']:.2f}{expected})"
            )
