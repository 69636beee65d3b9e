"""A rank that dies, raises or hangs ends the whole job in bounded time, with the cause and its rank last."""

import socket

import pytest

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


def test_a_port_in_use_is_named(inputs):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with jobs.start(inputs, port=port, output_dir="port") as job:
            assert job.end(jobs.START_LIMIT_S) == 2
    assert f"rank 0 cannot listen on 127.0.0.1:{port}, the job's master port: it is in use" in job.output()
    assert "Traceback" not in job.output()
