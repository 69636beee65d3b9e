"""The README's map, commands and settings are those of the tree."""

import dataclasses
import re
from pathlib import Path

import pytest

from ds_stochdpo import StochDPOConfig
from ds_stochdpo.model import FAMILIES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def mapped_files():
    table = README.split("## Map")[1].split("## ")[0]
    return set(re.findall(r"^\| `([^`]+)` \|", table, flags=re.MULTILINE))


def test_the_map_has_a_line_for_every_file():
    patterns = ("ds_stochdpo/**/*.py", "launch/**/*.py", "launch/*.sh", "launch/recipes/*.yaml", "ds_configs/*.json")
    files = {str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern)}
    files = {f for f in files if not f.endswith("__init__.py")}
    assert files - mapped_files() == set()
    assert all((ROOT / name).exists() for name in mapped_files())


def test_both_commands_are_there_and_run():
    for name in ("launch/quickstart.sh", "tests/run.sh"):
        assert f"bash {name}" in README
        assert (ROOT / name).stat().st_mode & 0o111
    assert "tests/run.sh" in (ROOT / ".ci" / "run").read_text()


OTHER_FLAGS = set(
    # Of the launchers, of launch/check_launch.py and of launch/inspect_data.py.
    "hostfile include exclude num_nodes num_gpus no_ssh node_rank master_addr master_port nnodes nproc_per_node "
    "shutdown_timeout write_env config help rows "
    # Of launch/estimate.py.
    "prompt_tokens chosen_tokens rejected_tokens tflops gpus_per_node link_gbps node_gbps plans nodes json "
    # Of launch/bench.py and launch/long_pair.py.
    "workloads trl layers sections variants dtype".split()
)


@pytest.mark.parametrize("path", ["README.md", "launch/MULTI_NODE.md"])
def test_flags_that_are_named_exist(path):
    fields = {f.name for f in dataclasses.fields(StochDPOConfig)}
    named = set(re.findall(r"--([a-z][a-z0-9_]+)", (ROOT / path).read_text(encoding="utf-8")))
    assert named
    assert named - OTHER_FLAGS - fields == set()


def test_the_models_named_are_those_supported():
    limits = README.split("## Limits")[1]
    heading, *rows = re.findall(r"^  \| `(\w+)` \| \w", limits, flags=re.MULTILINE)
    assert heading == "model_type"
    assert sorted(rows) == sorted(FAMILIES)
