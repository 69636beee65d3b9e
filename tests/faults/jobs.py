"""Starts launch/train.py under a launcher, with one thing going wrong, and watches how the whole job ends."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.tiny import tiny_llama, tiny_tokenizer, write_pairs

ROOT = Path(__file__).parents[2]
FAULTY = str(Path(__file__).parent / "faulty_train.py")
BIN = Path(sys.executable).parent
START_LIMIT_S = 240
"""For imports on a machine that is shared; nothing is measured before the fault."""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def make_inputs(folder, *, num_pairs=12, stage=3):
    """Model, pairs and DeepSpeed JSON of a job."""
    tokenizer = tiny_tokenizer()
    tiny_llama(len(tokenizer)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_pairs(folder / "pairs.jsonl", num_pairs)
    ds = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, "gradient_clipping": "auto"}
    (folder / "ds.json").write_text(json.dumps(ds))
    return folder


SETTINGS = {
    "model_name_or_path": "model",
    "dataset_name": "pairs.jsonl",
    "deepspeed": "ds.json",
    "reference": "none",
    "per_device_train_batch_size": 1,
    "learning_rate": 1e-3,
    "branch": "single",
}


def environment(**extra):
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    return kept | {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(ROOT),
        **extra,
    }


def arguments(settings):
    return [part for key, value in settings.items() for part in (f"--{key}", str(value))]


def launchers(port):
    """Command lines in front of the script, for two ranks."""
    return {
        "deepspeed": [str(BIN / "deepspeed"), "--num_accelerators", "2", "--master_port", str(port)],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2",
                     "--master_port", str(port)],
    }  # fmt: skip


class Job:
    """A job under way. As a context manager it leaves no process behind.

    Attributes:
        ranks: Process ids of the ranks, by rank, once `wait_for_step` has returned.
    """

    def __init__(self, command, folder, env):
        self.folder, self.ranks = folder, {}
        self.file = folder / f"output-{time.monotonic_ns()}.txt"
        with self.file.open("w") as output:
            self.process = subprocess.Popen(
                command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        self.family = [psutil.Process(self.process.pid)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._look()
        for process in self.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()

    def output(self):
        return self.file.read_text(errors="replace")

    def wait_for_step(self, step, num_ranks=2):
        """Until so many ranks have said that they are in this step."""
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            # Two ranks write at the same moment, so that a word of one may stand before the end of the other's line.
            said = set(re.findall(rf"pid (\d+) rank (\d) in step {step}(?!\d)", self.output()))
            self._look()
            if len(said) == num_ranks:
                self.ranks = {int(rank): int(pid) for pid, rank in said}
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        pytest.fail(f"the ranks did not reach step {step}\n{self.output()[-4000:]}", pytrace=False)

    def signal(self, pid, signum):
        os.kill(pid, signum)

    def interrupt(self):
        """What Ctrl-C does: SIGINT to every process of the terminal."""
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self, limit_s):
        """Exit code of the launcher, once every process of the job is gone; fails where one outlives the limit."""
        begun = time.monotonic()
        while time.monotonic() < begun + limit_s:
            self._look()
            code = self.process.poll()
            if code is not None and not any(map(_lives, self.family)):
                self.seconds = time.monotonic() - begun
                return code
            time.sleep(0.05)
        alive = [f"{p.pid} {p.cmdline()[:4]}" for p in self.family if _lives(p)]
        pytest.fail(f"after {limit_s} s still there: {alive}\n{self.output()[-4000:]}", pytrace=False)

    def last_words(self):
        """Last line that a rank wrote; what the launchers add behind it is theirs."""
        said = re.findall(r"^(?:error|stopped|stopping) \[rank \d\]: .*$", self.output(), re.MULTILINE)
        return said[-1] if said else ""

    def _look(self):
        with contextlib.suppress(psutil.NoSuchProcess):
            known = {p.pid for p in self.family}
            self.family += [p for p in self.family[0].children(recursive=True) if p.pid not in known]


def _lives(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def start(folder, *, fault=None, rank=1, step=2, step_s=0.0, launcher="deepspeed", port=None, **settings):
    """Start a job of two ranks in which `fault` happens on one rank in the middle of a step."""
    env = environment(
        STEP_S=str(step_s), **({"FAULT": fault, "FAULT_RANK": str(rank), "FAULT_STEP": str(step)} if fault else {})
    )
    command = [*launchers(port or free_port())[launcher], FAULTY, *arguments({**SETTINGS, **settings})]
    return Job(command, folder, env)
