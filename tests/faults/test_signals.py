"""SIGTERM and Ctrl-C: the ranks finish one step together, keep a checkpoint, and are gone in 30 s; twice: at once."""

import re
import signal
import socket
import time

import pytest

from ds_stochdpo.train.checkpoints import newest_complete
from tests.faults import jobs

pytestmark = pytest.mark.multiproc

LIMIT_S = 30
STEP_S = 0.7
# Ending takes as long as reading this many steps' worth of output; a job has more steps than any test waits for.
LONG = {"num_train_epochs": 20, "step_s": STEP_S, "save_steps": 1000}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return jobs.make_inputs(tmp_path_factory.mktemp("inputs"))


def assert_kept(job, output_dir, name):
    """The last words name a step, and its checkpoint is the newest and complete."""
    step = re.search(
        rf"stopped \[rank \d\]: {name} after optimizer step (\d+); checkpoint-\1 is complete", job.last_words()
    )
    assert step, job.output()
    assert newest_complete(job.folder / output_dir).name == f"checkpoint-{step[1]}"


@pytest.mark.parametrize(
    ("to", "launcher", "code"),
    [
        # DeepSpeed's first process dies of the signal; the ranks see that.
        ("command", "deepspeed", -signal.SIGTERM),
        ("rank", "deepspeed", 128 + signal.SIGTERM),
        ("command", "torchrun", 1),
    ],
)
def test_sigterm(inputs, to, launcher, code):
    with jobs.start(inputs, launcher=launcher, output_dir=f"{to}-{launcher}", **LONG) as job:
        job.wait_for_step(2)
        job.signal(job.process.pid if to == "command" else job.ranks[1], signal.SIGTERM)
        assert job.end(LIMIT_S) == code, job.output()
    print(to, launcher, "seconds until all were gone:", round(job.seconds, 1))
    assert_kept(job, f"{to}-{launcher}", "SIGTERM")
    assert job.output().count("stopped [rank") == 1


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c(inputs, times):
    port = jobs.free_port()
    # A checkpoint after each step, of which a second Ctrl-C must leave the older ones whole.
    settings = LONG | ({"save_steps": 1} if times == 2 else {})
    with jobs.start(inputs, port=port, output_dir=f"ctrl-c-{times}", **settings) as job:
        job.wait_for_step(2)
        for _ in range(times):
            job.interrupt()
            # Signals of one kind that arrive at once count as one.
            time.sleep(0.3)
        job.end(LIMIT_S)
    print(times, "seconds until all were gone:", round(job.seconds, 1))
    if times == 1:
        assert_kept(job, "ctrl-c-1", "SIGINT")
    else:
        assert "SIGINT twice: ended at once" in job.last_words(), job.output()
        assert newest_complete(inputs / "ctrl-c-2")
    # DeepSpeed's first process shows where it waited; no rank does.
    assert 'launch/train.py", line' not in job.output()
    with socket.socket() as probe:
        # As a listener of the next job does: closed connections linger.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
