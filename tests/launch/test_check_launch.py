"""The check before a launch prints what would be started, and starts nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def check(folder, *options, **variables):
    environment = {k: v for k, v in os.environ.items() if k not in ("DS_ENV_FILE", "DS_ACCELERATOR", "HF_HOME")}
    environment |= {"HOME": str(folder / "home"), "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, str(ROOT / "launch" / "check_launch.py"), *options]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "hosts").write_text("hostA slots=4\nhostB slots=2\n")
    (tmp_path / ".deepspeed_env").write_text("OMP_NUM_THREADS=4\nHF_TOKEN=hf_secret\nA=b=c\n")
    return tmp_path


def test_machines_command_and_environment_are_shown(folder):
    options = ("--hostfile", "hosts", "--include", "hostB@hostA:1,3", "launch/train.py", "--config", "my run.yaml")
    done = check(folder, *options, HF_HOME="/shared/hf", HF_TOKEN="hf_other")
    assert done.returncode == 0, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert "4 ranks on 2 machines, rank 0 at hostA" in lines
    assert "hostA: ranks 0 to 1, slots 1, 3" in lines
    assert "hostB: ranks 2 to 3, slots 0, 1" in lines
    assert "launch/train.py --config 'my run.yaml'" in done.stdout
    assert {"OMP_NUM_THREADS=4", "HF_TOKEN=********", "A=b=c", f"PYTHONPATH={ROOT}"} <= set(lines)
    assert "warning: HF_HOME is set here and does not reach the machines; put it into .deepspeed_env" in done.stdout
    assert "hf_secret" not in done.stdout + done.stderr


def test_without_ssh_each_machine_has_its_own_shell(folder):
    options = ("--hostfile", "hosts", "--no_ssh", "--node_rank", "0", "launch/train.py")
    done = check(folder, *options, HF_HOME="/shared/hf")
    assert done.returncode == 0, done.stderr
    assert "OMP_NUM_THREADS=4" not in done.stdout
    assert "warning: HF_HOME is set here and does not reach the machines; set it in the shell of each." in done.stdout


def test_a_clean_environment_file_is_written(folder):
    (folder / ".deepspeed_env").write_text("# note\n\nA=b=c\n")
    refused = check(folder, "--hostfile", "hosts", "launch/train.py")
    assert refused.returncode == 2
    assert ".deepspeed_env:1: a comment" in refused.stderr
    done = check(folder, "--hostfile", "hosts", "--write_env", "env.ds", "launch/train.py", HF_HOME="/shared/hf")
    assert done.returncode == 0, done.stderr
    written = dict(line.split("=", maxsplit=1) for line in (folder / "env.ds").read_text().splitlines())
    assert written["A"] == "b=c"
    assert written["HF_HOME"] == "/shared/hf"
    assert "PYTHONPATH" not in written


def test_a_missing_host_file_ends_with_a_sentence(folder):
    done = check(folder, "--hostfile", "nowhere", "launch/train.py")
    assert done.returncode == 2
    assert done.stderr.startswith("error: hostfile is 'nowhere', which cannot be read")
    assert "Traceback" not in done.stderr
