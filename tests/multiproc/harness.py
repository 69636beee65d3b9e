"""Starts one process a rank over gloo, runs a worker in each, and hands back what the ranks returned.

A worker is a plain function `worker(args, folder)`. It runs as `python -m tests.multiproc.harness`, so that it sees the
same source tree as the test that starts it, and never inherits an imported DeepSpeed from pytest's process.
"""

import importlib
import os
import pickle
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120
# A rank that outlives a failed one by this long hangs in a collective.
GRACE_S = 30


@dataclass
class Job:
    """How the ranks ended: exit codes, outputs, and the seconds each of them lived."""

    codes: list
    outputs: list
    seconds: list
    folder: Path

    def report(self):
        parts = [
            f"--- rank {r} (exit {c}, {s:.1f} s), end of output ---\n{o[-4000:]}"
            for r, (c, o, s) in enumerate(zip(self.codes, self.outputs, self.seconds, strict=True))
        ]
        return "\n".join(parts)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank_env(rank, world_size, port, folder, extra):
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        # Ranks that enter different collectives then end with a readable error instead of a hang.
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
        # A lock left here by a killed build would hang every later run.
        "TORCH_EXTENSIONS_DIR": str(folder / "torch_extensions"),
        **extra,
    }


def start(worker, world_size, folder, args=None, *, limit_s=LIMIT_S, env=None):
    """Run `worker` (a function at the top of a test module) on every rank until all have ended; never raises."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "args.pkl").write_bytes(pickle.dumps(args))
    port = free_port()
    name = f"{worker.__module__}:{worker.__name__}"
    processes = []
    for rank in range(world_size):
        with (folder / f"output{rank}.txt").open("w") as output:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-W", "ignore::FutureWarning", "-m", "tests.multiproc.harness", name, str(folder)],
                    cwd=ROOT,
                    env=rank_env(rank, world_size, port, folder, env or {}),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        seconds = _wait(processes, limit_s)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    outputs = [(folder / f"output{r}.txt").read_text(errors="replace") for r in range(world_size)]
    return Job([p.returncode for p in processes], outputs, seconds, folder)


def _wait(processes, limit_s):
    begun = time.monotonic()
    deadline = begun + limit_s
    ended = {}
    while len(ended) < len(processes) and time.monotonic() < deadline:
        for rank, process in enumerate(processes):
            if rank not in ended and process.poll() is not None:
                ended[rank] = time.monotonic() - begun
                if process.returncode:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.05)
    # A rank that had to be killed counts as one that never ended.
    return [ended.get(rank, float("inf")) for rank in range(len(processes))]


def run(worker, world_size, folder, args=None, **options):
    """`start`, then what each rank's worker returned; a failed rank fails the test with every rank's output."""
    job = start(worker, world_size, folder, args, **options)
    if any(job.codes) or not all(s < float("inf") for s in job.seconds):
        pytest.fail(f"{worker.__name__} on {world_size} ranks failed\n{job.report()}", pytrace=False)
    return [pickle.loads((folder / f"result{r}.pkl").read_bytes()) for r in range(world_size)], job


def main():
    name, folder = sys.argv[1], Path(sys.argv[2])
    module, function = name.split(":")
    import torch

    torch.set_num_threads(1)
    worker = getattr(importlib.import_module(module), function)
    args = pickle.loads((folder / "args.pkl").read_bytes())
    try:
        result = worker(args, folder)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        raise SystemExit(1) from None
    (folder / f"result{os.environ['RANK']}.pkl").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main()
