"""The Slurm script with stand-ins for Slurm's commands: what it starts, and what it does near the time limit."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "launch" / "slurm.sh"

# Each leaves a line in `log`. A step that is told to end does so with the code of a run that was stopped.
COMMANDS = {
    "srun": '[[ $1 == --kill-on-bad-exit=1 ]] && shift; SLURM_NODEID=0 exec "$@"',
    "torchrun": """trap 'echo "torchrun saved" >> "$LOG"; exit 143' TERM
echo $BASHPID > "$LOG.pid"; echo "torchrun $*" >> "$LOG"; for _ in $(seq ${STEPS:-1}); do sleep 0.1; done""",
    "scontrol": 'if [[ $1 == show ]]; then printf "node7\\nnode8\\n"; else echo "scontrol $*" >> "$LOG"; fi',
    "scancel": 'echo "scancel $*" >> "$LOG"; kill -TERM "$(cat "$LOG.pid")"',
}


@pytest.fixture
def start(tmp_path):
    for name, body in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)

    def start(*arguments, steps=1):
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("MASTER_", "OMP_"))} | {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "LOG": str(tmp_path / "log"),
            "STEPS": str(steps),
            "SLURM_JOB_ID": "20042",
            "SLURM_JOB_NODELIST": "node[7-8]",
            "SLURM_NNODES": "2",
            "SLURM_GPUS_ON_NODE": "8",
            "SLURM_CPUS_PER_TASK": "60",
        }
        return subprocess.Popen(
            ["bash", str(SCRIPT), *arguments], env=environment, stdout=subprocess.PIPE, text=True, cwd=tmp_path
        )

    return start


def log(folder):
    path = folder / "log"
    return path.read_text().splitlines() if path.exists() else []


def test_one_torchrun_a_machine_with_the_settings_given(start, tmp_path):
    job = start("--config", "my run.yaml", "--beta", "0.2")
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 0, output
    assert log(tmp_path) == [
        "torchrun --nnodes 2 --nproc_per_node 8 --node_rank 0 --master_addr node7 --master_port 20042 "
        "--shutdown_timeout 570 launch/train.py --resume_from_checkpoint latest --config my run.yaml --beta 0.2"
    ]


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGTERM])
def test_near_the_time_limit_the_job_saves_and_goes_back_into_the_queue(start, tmp_path, signum):
    job = start(steps=600 if signum == signal.SIGUSR1 else 20)
    deadline = time.monotonic() + 60
    while not log(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    job.send_signal(signum)
    output, _ = job.communicate(timeout=60)
    rest = log(tmp_path)[1:]
    if signum == signal.SIGUSR1:
        assert job.returncode == 143, output
        assert rest == ["scancel --signal=TERM 20042", "torchrun saved", "scontrol requeue 20042"]
    else:
        # Slurm tells the step itself and puts the job back itself.
        assert job.returncode == 0
        assert rest == []
        assert "preempted or cancelled" in output
