"""A rank that dies, raises or hangs ends the whole job in bounded time, with the cause and its rank last."""

import socket
import subprocess

import pytest

from ds_stochdpo.train.checkpoints import newest_complete
from tests.faults import jobs

pytestmark = pytest.mark.multiproc

LIMIT_S = 60


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return jobs.make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        # The launcher of DeepSpeed ends with the negative number of the signal that killed a rank, modulo 256.
        ("kill", 256 - 9, r"rank 1 (process {pid} on"),
        ("raise", 1, "error [rank 1]: RuntimeError: deliberately broken step"),
        ("hang", 4, "in sleep_for_ever; its stack is above. waiting in a collective: rank 0"),
    ],
)
def test_a_rank_that_fails_ends_the_job(inputs, fault, code, words):
    with jobs.start(inputs, fault=fault, output_dir=fault, step_timeout_s=4) as job:
        job.wait_for_step(1)
        pid = job.ranks[1]
        assert job.end(LIMIT_S) == code
    print(fault, "seconds until all were gone:", round(job.seconds, 1))
    assert words.format(pid=pid) in job.last_words(), job.output()
    assert job.output().count("Traceback") == (fault == "raise"), job.output()
    if fault == "hang":
        assert "stack of rank 1" in job.output()
        assert "stack of rank 0" not in job.output()


def test_an_exception_after_a_save_leaves_what_was_saved(inputs):
    """Saving is entered by all ranks or by none: two steps are saved, the third fails on one rank."""
    with jobs.start(inputs, fault="raise", step=3, save_steps=1, output_dir="saved") as job:
        assert job.end(jobs.START_LIMIT_S) == 1, job.output()
    assert "error [rank 1]: RuntimeError: deliberately broken step" in job.last_words(), job.output()
    assert newest_complete(inputs / "saved").name == "checkpoint-2"
    assert not list((inputs / "saved").glob("model*.safetensors"))
    with jobs.start(inputs, save_steps=1, output_dir="saved", resume_from_checkpoint="latest") as job:
        assert job.end(jobs.START_LIMIT_S) == 0, job.output()
    assert "resuming from saved/checkpoint-2, optimizer step 2" in job.output()
    assert (inputs / "saved" / "model.safetensors").exists()


@pytest.fixture
def small_disk(inputs):
    """A file system of 2 MiB; needs root."""
    disk = inputs / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", disk], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no right to mount a small disk: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_disk_that_fills_up_in_a_save_keeps_the_older_checkpoint(inputs, small_disk):
    with jobs.start(inputs, fault="fill", rank=0, save_steps=1, output_dir="disk/run") as job:
        assert job.end(jobs.START_LIMIT_S) == 2, job.output()
    assert "No space left on device" in job.last_words(), job.output()
    assert "checkpoint-2" in job.last_words()
    assert "Traceback" not in job.output()
    assert newest_complete(small_disk / "run").name == "checkpoint-1"


def test_a_port_in_use_is_named(inputs):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with jobs.start(inputs, port=port, output_dir="port") as job:
            assert job.end(jobs.START_LIMIT_S) == 2
    assert f"rank 0 cannot listen on 127.0.0.1:{port}, the job's master port: it is in use" in job.output()
    assert "Traceback" not in job.output()


def test_a_host_file_that_is_missing_is_an_error(inputs):
    command = [str(jobs.BIN / "deepspeed"), "--hostfile", "nowhere", "--num_gpus", "1", "--master_port",
               str(jobs.free_port()), jobs.FAULTY, *jobs.arguments(jobs.SETTINGS)]  # fmt: skip
    with jobs.Job(command, inputs, jobs.environment()) as job:
        assert job.end(jobs.START_LIMIT_S) == 2, job.output()
    assert f"error [rank 0]: hostfile is '{inputs / 'nowhere'}', which cannot be read" in job.last_words()
    assert "rows read" not in job.output()
