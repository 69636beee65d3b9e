"""Measurements that are no variant of a step: overhead outside the model, cost against size, the head, ZeRO-3 traffic.

Each is a function of settings and layers that returns a part of the record. Entry: `SECTIONS`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ds_stochdpo
from benchmarking.variants import Bench, variant_of
from benchmarking.workload import Workload, build_model, load_workload
from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.model import ScoringOptions, chunked_logps
from ds_stochdpo.model.rehearsal import TensorMeter

FLAT_PAIRS = (4, 16, 64)
FLAT_LENGTHS = (256, 1024, 4096)
HEAD_ROWS = 4096


def measure_overhead(config: StochDPOConfig, num_layers: int, num_rounds: int) -> dict[str, Any]:
    """Share of `engine.train_step` that is spent outside the model: draws, packing, layout, checks, metrics.

    Forward, backward and optimizer step of the DeepSpeed engine count as the model.
    """
    pairs = load_workload(config.dataset_name, config, config.per_device_train_batch_size or 8).pairs
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = StochDPOConfig(**{**config.to_dict(), "reference": "none", "max_grad_norm": 0.0, "deepspeed": None})
    engine = ds_stochdpo.initialize(model=build_model(config, num_layers, device), config=settings)
    clock = _Clock(engine.deepspeed)
    engine.deepspeed = clock
    shares, steps = [], []
    for number in range(1 + num_rounds):
        clock.inside, engine.epoch, started = 0.0, number, time.perf_counter()
        engine.train_step(pairs)
        total = time.perf_counter() - started
        if number:
            shares.append(1 - clock.inside / total)
            steps.append(total)
    return {
        "pairs": len(pairs),
        "layers": num_layers,
        "step_s": statistics.median(steps),
        "outside_share": {"median": statistics.median(shares), "min": min(shares), "max": max(shares)},
    }


class _Clock:
    """Stands for a DeepSpeed engine and adds up the time spent in it."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.inside = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def __call__(self, *args: Any) -> Any:
        return self._timed(self._engine, *args)

    def backward(self, *args: Any) -> Any:
        return self._timed(self._engine.backward, *args)

    def step(self, *args: Any) -> Any:
        return self._timed(self._engine.step, *args)

    def _timed(self, work: Callable[..., Any], *args: Any) -> Any:
        started = time.perf_counter()
        output = work(*args)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.inside += time.perf_counter() - started
        return output


def measure_flatness(config: StochDPOConfig, num_layers: int, num_rounds: int) -> dict[str, Any]:
    """Microseconds per executed token, attention's kernels apart, as the batch and the rows grow.

    Batches of 4 to 64 pairs of 256 tokens; rows of 256 to 4096 tokens, 16,384 in all. Half of a row is prompt.
    """
    bench = Bench(config, num_layers, ("lanes",))
    variant = variant_of("single", config, 1)
    grid = [(pairs, 256) for pairs in FLAT_PAIRS] + [(16384 // n, n) for n in FLAT_LENGTHS if n != 256]
    batches = [
        load_workload(f"synthetic:{length // 2}x{length - length // 2}", config, pairs) for pairs, length in grid
    ]
    points: list[dict[str, Any]] = [{"pairs": p, "length": n, "us_per_token": []} for p, n in grid]
    for number in range(num_rounds + 1):
        for point, batch in zip(points, batches, strict=True):
            step_s, attention_s = _step_without_attention(bench, variant, batch, number)
            tokens = sum(len(p.prompt_ids) + len(p.chosen_ids) + len(p.rejected_ids) for p in batch.pairs)
            if number:
                point["us_per_token"].append(1e6 * (step_s - attention_s) / tokens)
    for point in points:
        point["median"] = statistics.median(point["us_per_token"])
    medians = [point["median"] for point in points]
    return {"variant": "single", "points": points, "largest_over_smallest": max(medians) / min(medians)}


def _step_without_attention(bench: Bench, variant: Any, batch: Workload, turn: int) -> tuple[float, float]:
    # Else the profiler prints two lines a step.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activity = torch.profiler.ProfilerActivity
    kinds = [activity.CPU, activity.CUDA] if bench.device.type == "cuda" else [activity.CPU]
    started = time.perf_counter()
    with torch.profiler.profile(activities=kinds) as profile:
        bench.step(variant, batch.pairs, turn)
    step_s = time.perf_counter() - started
    fused = [event for event in profile.key_averages() if "scaled_dot_product" in event.key or "flash" in event.key]
    field = "self_device_time_total" if bench.device.type == "cuda" else "self_cpu_time_total"
    return step_s, sum(getattr(event, field) for event in fused) / 1e6


def measure_head(config: StochDPOConfig, num_layers: int, num_rounds: int) -> dict[str, Any]:
    """Forward and backward of the output head alone on 4,096 rows: full logits, chunks rebuilt, chunks kept."""
    model = build_model(config, 1, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    weight = model.get_output_embeddings().weight
    hidden = torch.randn(HEAD_ROWS, weight.shape[1], dtype=weight.dtype, device=weight.device, requires_grad=True)
    target = torch.randint(0, weight.shape[0], (HEAD_ROWS,), device=weight.device)
    slope = torch.randn(HEAD_ROWS, device=weight.device)

    def full() -> None:
        logps = (hidden @ weight.T).float().log_softmax(-1).gather(-1, target[:, None]).squeeze(-1)
        (logps * slope).sum().backward()

    def chunked(recompute: bool) -> None:
        options = ScoringOptions(config.score_chunk_rows, recompute)
        (chunked_logps(hidden, weight, target, options) * slope).sum().backward()

    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    forms = {"full": full, "chunked": lambda: chunked(True), "chunks_kept": lambda: chunked(False)}
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for number in range(num_rounds + 1):
        for name, work in forms.items():
            started = time.perf_counter()
            work()
            if weight.is_cuda:
                torch.cuda.synchronize()
            if number:
                seconds[name].append(time.perf_counter() - started)
    live = {}
    for name, work in forms.items():
        with TensorMeter(model) as meter:
            work()
        # Both forms make the two gradients; what the head itself needs is beyond them.
        live[name] = meter.peak_bytes - sum(t.numel() * t.element_size() for t in (weight, hidden))
    return {
        "rows": HEAD_ROWS,
        "vocab": weight.shape[0],
        "hidden": weight.shape[1],
        "seconds": seconds,
        "time_of_full": {
            n: statistics.median(a / b for a, b in zip(seconds[n], seconds["full"], strict=True)) for n in forms
        },
        "live_bytes": live,
        "memory_of_full": {n: live[n] / live["full"] for n in forms},
    }


def measure_gathers(config: StochDPOConfig, num_layers: int, num_rounds: int) -> dict[str, Any]:
    """Bytes that ZeRO-3 moves in one step on 2 ranks, exact and pruned."""
    del num_rounds
    with tempfile.TemporaryDirectory() as folder:
        request, answer = Path(folder) / "request.json", Path(folder) / "answer.json"
        request.write_text(json.dumps({"settings": config.to_dict(), "layers": num_layers, "answer": str(answer)}))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        script = Path(__file__).with_name("gathers.py")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, str(script), str(request)], check=True, env=environment, stdout=subprocess.DEVNULL)
        return json.loads(answer.read_text())


def _overhead_lines(found: dict[str, Any]) -> list[str]:
    share = found["outside_share"]
    return [
        f"outside the model: {share['median']:.2%} of a step ({share['min']:.2%}-{share['max']:.2%}), "
        f"{found['pairs']} pairs, {found['step_s']:.2f} s"
    ]


def _flatness_lines(found: dict[str, Any]) -> list[str]:
    points = [f"  {p['pairs']:4d} pairs of {p['length']:5d} tokens {p['median']:9.1f}" for p in found["points"]]
    spread = f"largest over smallest: {found['largest_over_smallest']:.3f}"
    return [f"microseconds per token, attention kernels apart, variant {found['variant']}; {spread}", *points]


def _head_lines(found: dict[str, Any]) -> list[str]:
    head = f"head alone, {found['rows']} rows x {found['vocab']} tokens, forward and backward, against full logits"
    rows = [
        f"  {name:12s} time {found['time_of_full'][name]:.2f}x, live memory {found['memory_of_full'][name]:.3f}x"
        for name in found["seconds"]
        if name != "full"
    ]
    return [head, *rows]


def _gathers_lines(found: dict[str, Any]) -> list[str]:
    moved = [f"{name} {sum(found[name].values()) / 2**20:.1f} MiB" for name in ("exact", "pruned")]
    return [
        f"ZeRO-3 traffic of a step on {found['ranks']} ranks: {', '.join(moved)}, {found['pruned_over_exact']:.3f}x"
    ]


@dataclass(frozen=True)
class Section:
    """A further measurement.

    Attributes:
        measure: From settings, layers and rounds to its part of the record.
        lines: That part for people.
    """

    measure: Callable[[StochDPOConfig, int, int], dict[str, Any]]
    lines: Callable[[dict[str, Any]], list[str]]


SECTIONS = {
    "head": Section(measure_head, _head_lines),
    "overhead": Section(measure_overhead, _overhead_lines),
    "flatness": Section(measure_flatness, _flatness_lines),
    "gathers": Section(measure_gathers, _gathers_lines),
}
"""By name, what `--sections` can ask for."""
