"""Host files, filters and environment files: what is wrong is named with its line before anything starts."""

import pytest
from deepspeed.launcher import runner

from ds_stochdpo import LaunchError
from ds_stochdpo.job.hostfile import plan_hosts, read_hostfile
from ds_stochdpo.job.launch_checks import named_hostfile
from ds_stochdpo.job.launcher import is_launcher
from ds_stochdpo.job.node_env import check_ranks_agree, env_files, forwarded, mask, read_env_file

GOOD = "# two machines\n\nhostA slots=4\n  hostB   slots=2  \n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hostA slots=2\nhostB lots=2\n", ":2: 'hostB lots=2' is no machine"),
        ("hostA\n", ":1: 'hostA' is no machine"),
        ("hostA slots=2 max=3\n", ":1: 'hostA slots=2 max=3' is no machine"),
        ("hostA slots=0\n", "N of at least 1"),
        ("\n# hostA slots=2\n", "names no machine"),
        ("", "names no machine"),
        ("hostA slots=2\n#\nhostB slots=2\nhostA slots=1\n", ":4: hostA is in line 1 already"),
    ],
)
def test_a_wrong_host_file_is_named_with_its_line(tmp_path, text, words):
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(LaunchError, match=words) as caught:
        read_hostfile(tmp_path / "hosts")
    assert str(tmp_path / "hosts") in str(caught.value)


def test_a_missing_host_file_is_an_error(tmp_path):
    with pytest.raises(LaunchError, match="cannot be read: No such file"):
        read_hostfile(tmp_path / "hosts")


@pytest.mark.parametrize(
    ("filters", "slots"),
    [
        ({}, {"hostA": [0, 1, 2, 3], "hostB": [0, 1]}),
        ({"include": "hostB"}, {"hostB": [0, 1]}),
        ({"include": "hostB:1@hostA:3,0"}, {"hostA": [0, 3], "hostB": [1]}),
        ({"exclude": "hostA:1,2@hostB"}, {"hostA": [0, 3]}),
        ({"num_nodes": 1, "num_gpus": 2}, {"hostA": [0, 1]}),
    ],
)
def test_filters_pick_what_deepspeed_picks(tmp_path, filters, slots):
    (tmp_path / "hosts").write_text(GOOD)
    hosts = read_hostfile(tmp_path / "hosts")
    assert hosts == dict(runner.fetch_hostfile(str(tmp_path / "hosts"))) == {"hostA": 4, "hostB": 2}
    assert plan_hosts(hosts, **filters) == slots
    theirs = runner.parse_inclusion_exclusion(hosts, filters.get("include", ""), filters.get("exclude", ""))
    theirs = runner.apply_num_nodes_and_gpus(theirs, filters.get("num_nodes", -1), filters.get("num_gpus", -1))
    assert dict(theirs) == slots


@pytest.mark.parametrize(
    ("filters", "words"),
    [
        ({"include": "hostC"}, "names hostC, which is not in the host file: hostA, hostB"),
        ({"include": "hostB:2"}, "slot 2 of hostB, which has slots 0 to 1"),
        ({"exclude": "hostB:x"}, "'hostB:x' is no machine"),
        ({"include": "hostA:"}, "'hostA:' is no machine"),
        ({"exclude": "hostA@hostB"}, "no machine is left"),
        ({"include": "hostA", "exclude": "hostB"}, "keep one of them"),
        ({"include": "hostA", "num_gpus": 1}, "keep one kind"),
        ({"num_nodes": 3}, "names 2 machines"),
        ({"num_gpus": 3}, "hostB has 2 slots"),
    ],
)
def test_a_filter_that_fits_nothing_is_refused(filters, words):
    with pytest.raises(LaunchError, match=words):
        plan_hosts({"hostA": 4, "hostB": 2}, **filters)


def test_an_environment_file_is_read_where_deepspeed_fails(tmp_path):
    path = tmp_path / "env"
    path.write_text("OMP_NUM_THREADS=4\n\n# note\nA=b=c\n# B=1\nno equals\nC=$HOME\n")
    values, problems = read_env_file(path)
    assert values == {"OMP_NUM_THREADS": "4", "A": "b=c", "C": "$HOME"}
    lines = [problem.removeprefix(f"{path}:").split(":")[0] for problem in problems]
    assert lines == ["2", "3", "5", "6", "7"]
    assert "remove it" in problems[0]


def test_environment_files_and_what_needs_none(tmp_path):
    home, folder = tmp_path / "home", tmp_path / "work"
    for place in (home, folder):
        place.mkdir()
        (place / ".deepspeed_env").write_text("")
    assert env_files({"HOME": str(home)}, folder) == [home / ".deepspeed_env", folder / ".deepspeed_env"]
    (folder / "other").write_text("")
    assert env_files({"HOME": str(home), "DS_ENV_FILE": str(folder / "other")}, home) == [folder / "other"]
    environment = {"PYTHONPATH": "p", "NCCL_DEBUG": "INFO", "HF_HOME": "h"}
    assert forwarded(environment, has_cuda=True) == {"NCCL_DEBUG": "INFO", "PYTHONPATH": "p"}
    assert forwarded(environment, has_cuda=False) == {"PYTHONPATH": "p"}


@pytest.mark.parametrize(
    ("key", "is_secret"),
    [
        ("HF_TOKEN", True),
        ("WANDB_API_KEY", True),
        ("DB_PASSWORD", True),
        ("aws_secret_access_key", True),
        ("TOKENIZERS_PARALLELISM", False),
        ("PYTHONPATH", False),
        ("HF_HOME", False),
    ],
)
def test_secrets_are_masked(key, is_secret):
    assert ("value" not in mask(key, "value")) == is_secret


@pytest.mark.parametrize(
    ("command", "hostfile"),
    [
        (["python", "/bin/deepspeed", "--hostfile", "F", "train.py"], "F"),
        (["python", "/bin/deepspeed", "-H=F", "train.py"], "F"),
        (["python", "-u", "/bin/deepspeed", "--no_ssh", "--master_port", "1", "--hostfile=F", "train.py"], "F"),
        (["python", "/bin/deepspeed", "train.py", "--hostfile", "F"], None),
        (["python", "-m", "deepspeed.launcher.launch", "--hostfile", "F"], None),
    ],
)
def test_the_host_file_of_a_command_line(command, hostfile):
    assert named_hostfile(command) == hostfile


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        (["/v/python", "/v/bin/deepspeed", "train.py"], True),
        (["/v/python", "-u", "-m", "deepspeed.launcher.launch", "--world_info=x", "train.py"], True),
        (["/v/python", "/v/bin/torchrun", "train.py"], True),
        (["/v/python", "-m", "torch.distributed.run", "train.py"], True),
        (["bash", "-c", "deepspeed train.py"], False),
        (["/v/python", "train.py", "deepspeed"], False),
    ],
)
def test_launchers_are_known_by_their_command(command, answer):
    assert is_launcher(command) == answer


class SomeRanks:
    """Four ranks on two machines, of which the second may be different."""

    is_main = True

    def __init__(self, **changes):
        self.changes = changes

    def gather_objects(self, item):
        _, own = item
        other = {key: own[key] | self.changes.get(key, {}) for key in own}
        return [("node1", own), ("node1", own), ("node2", other), ("node2", other)]


def test_ranks_of_other_versions_are_refused_and_other_variables_named(monkeypatch, caplog):
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    check_ranks_agree(SomeRanks())
    assert not caplog.records
    check_ranks_agree(SomeRanks(environment={"OMP_NUM_THREADS": None}))
    assert "OMP_NUM_THREADS differs: 8 on rank 0 (node1), 1 (node1); None on rank 2 (node2), 3 (node2)" in caplog.text
    with pytest.raises(LaunchError, match=r"versions of torch: .* on rank 0 .*; 1\.0 on rank 2 \(node2\), 3"):
        check_ranks_agree(SomeRanks(versions={"torch": "1.0"}))
