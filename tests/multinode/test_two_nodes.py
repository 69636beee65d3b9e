"""A job on two hosts: over ssh it trains what one host trains; cut off, both sides end, and it goes on from there."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.faults import jobs
from tests.multinode.hosts import Hosts, missing

REASON = missing()
pytestmark = [pytest.mark.multinode, pytest.mark.skipif(bool(REASON), reason=REASON)]

LIMIT_S = 60
SETTINGS = {**jobs.SETTINGS, "max_steps": 4, "position_keep": 0.5, "prefix_keep": 0.75}
SCRIPT = str(jobs.ROOT / "launch" / "train.py")
DEEPSPEED = str(jobs.BIN / "deepspeed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return jobs.make_inputs(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
    # sshd reads the key as root, but a client's key must be closed to others, and so its folder may stay.
    with Hosts(folder) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def one_host(folder):
    """Weights of the same job on one host, two ranks."""
    command = [*jobs.launchers(jobs.free_port())["torchrun"], SCRIPT]
    with jobs.Job([*command, *jobs.arguments({**SETTINGS, "output_dir": "one"})], folder, jobs.environment()) as job:
        assert job.end(jobs.START_LIMIT_S) == 0, job.output()
    return load_file(folder / "one" / "model.safetensors")


def environment(hosts, folder):
    """What the first host's shell has, and in a file what DeepSpeed is to send to the others."""
    sent = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    (folder / "env.ds").write_text("".join(f"{key}={value}\n" for key, value in sent.items()))
    env = jobs.environment(DS_ENV_FILE=str(folder / "env.ds"), PDSH_SSH_ARGS_APPEND=f"-F {hosts.ssh_config}")
    # The names of the hosts lead to their addresses; `lo` would keep the ranks apart.
    del env["GLOO_SOCKET_IFNAME"]
    return env


def assert_equal(weights, other):
    assert weights.keys() == other.keys()
    for name, value in other.items():
        assert torch.equal(weights[name], value), name


def test_over_ssh_two_hosts_train_what_one_does(hosts, folder, one_host):
    command = [DEEPSPEED, "--hostfile", str(hosts.hostfile), "--no_ssh_check", "--master_addr", hosts.addresses[0],
               "--master_port", "29870", SCRIPT, *jobs.arguments({**SETTINGS, "output_dir": "ssh"})]  # fmt: skip
    with jobs.Job(hosts.inside(0, command), folder, environment(hosts, folder)) as job:
        assert job.end(jobs.START_LIMIT_S) == 0, job.output()
    assert "2 rank(s), ZeRO stage 3" in job.output()
    assert "differs" not in job.output()
    assert_equal(load_file(folder / "ssh" / "model.safetensors"), one_host)


def start_without_ssh(hosts, folder, *, script, port, **settings):
    """One launcher on each host."""
    values = {**SETTINGS, "save_steps": 1, "output_dir": "cut", **settings}
    env = environment(hosts, folder) | {"STEP_S": "2.0"}
    for index in (0, 1):
        command = [DEEPSPEED, "--hostfile", str(hosts.hostfile), "--no_ssh", "--node_rank", str(index),
                   "--master_addr", hosts.addresses[0], "--master_port", str(port), script,
                   *jobs.arguments(values)]  # fmt: skip
        yield jobs.Job(hosts.inside(index, command), folder, env)


def test_a_cable_that_is_pulled_ends_both_sides_and_the_job_goes_on(hosts, folder, one_host):
    options = {"step_timeout_s": 12, "port": 29871, "script": jobs.FAULTY}
    first, second = start_without_ssh(hosts, folder, **options)
    with first, second:
        first.wait_for_step(3, num_ranks=1)
        hosts.cable("down")
        try:
            codes = [job.end(LIMIT_S) for job in (first, second)]
        finally:
            hosts.cable("up")
    print("seconds until all were gone:", round(first.seconds + second.seconds, 1))
    assert codes == [4, 4], first.output() + second.output()
    for job, other in ((first, 1), (second, 0)):
        assert "no micro-batch was finished for 12 s (step_timeout_s)" in job.last_words(), job.output()
        assert f"rank {other}" in job.last_words()
    checkpoints = sorted(path.name for path in (folder / "cut").glob("checkpoint-*"))
    assert checkpoints == ["checkpoint-1", "checkpoint-2"]
    options = {"script": SCRIPT, "port": 29872, "resume_from_checkpoint": "latest"}
    first, second = start_without_ssh(hosts, folder, **options)
    with first, second:
        for job in (first, second):
            assert job.end(jobs.START_LIMIT_S) == 0, job.output()
    lines = [json.loads(line) for line in (folder / "cut" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert_equal(load_file(folder / "cut" / "model.safetensors"), one_host)
