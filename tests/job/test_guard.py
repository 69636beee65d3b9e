"""What a guarded process does with signals and its own workers; how whole jobs end is tested in tests/faults."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
START = "import time; from ds_stochdpo.job import Guard; guard = Guard(); guard.start()\n"


def guarded(code):
    """A process of its own, in which a guard has started; it says "ready"."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", f"{START}{code}"], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_a_forked_worker_still_ends_when_it_is_told_to():
    code = (
        "import multiprocessing; worker = multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,))\n"
        "worker.start(); worker.terminate(); worker.join(20); print(worker.exitcode)"
    )
    output, errors = guarded(code).communicate(timeout=120)
    assert output.strip() == str(-signal.SIGTERM), errors


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_training_ends_the_process_at_once(signum):
    process = guarded("print('ready', flush=True); time.sleep(60)")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signum)
    begun = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    assert errors == f"stopped [rank 0]: {signum.name} before training began: there is nothing to save\n"
    assert time.monotonic() - begun < 30


def test_a_signal_in_training_is_only_noted():
    wait = "while not guard.wanted: time.sleep(0.05)"
    code = f"guard.can_finish = True; print('ready', flush=True)\n{wait}\nprint(guard.wanted)"
    process = guarded(code)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, "15\n"), errors
