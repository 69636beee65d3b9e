"""The command that people choose a plan with."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_stochdpo.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def command():
    spec = importlib.util.spec_from_file_location("estimate_command", ROOT / "launch" / "estimate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_70b_recipe_before_anything_is_rented(tmp_path):
    path = tmp_path / "estimate.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    flags = ["--config", "launch/recipes/70b_multi_node.yaml", "--plans", "stock,these settings", "--json", str(path)]
    done = subprocess.run(
        [sys.executable, "launch/estimate.py", *flags],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "70,553,706,496 weights, bf16" in done.stdout
    stock, own = json.loads(path.read_text())["plans"]
    # 1024 + 1023 live and 1023 frozen tokens instead of 4096 live ones: about 4 x 4096 / (4 x 2047 + 1023).
    assert own["times_faster_than_stock"] == pytest.approx(1.78, rel=0.01)
    assert own["peak"]["device"] < 80 * 10**9 < stock["peak"]["device"]
    readme = (ROOT / "README.md").read_text()
    for title, plan in (("stock DPO", stock), ("exact + single branch (the recipe)", own)):
        tflop, faster = plan["work"]["total"] / 10**12, plan["times_faster_than_stock"]
        assert f"| {title} | {tflop:,.0f} | {faster:.2f} | {plan['peak']['device'] / 2**30:.1f} |" in readme
    # Each of 32 ranks gathers 141 GB of bf16 weights twice.
    assert own["traffic"]["all_gather"] == 2 * 2 * 70_553_706_496


def test_a_config_file_is_a_model(command):
    flags = ["--model_name_or_path", str(ROOT / "launch" / "recipes" / "shapes" / "smollm2-135m.json")]
    flags += ["--prompt_tokens", "40", "--chosen_tokens", "30", "--rejected_tokens", "20", "--plans", "exact"]
    (plan,) = command.run(flags).plans
    assert plan.work.tokens_executed == 40 + 29 + 19


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt_tokens", "5"], "give all three"),
        (["--nodes", "1,x"], "nodes is '1,x'"),
        (["--tflops", "0"], "tflops is 0.0"),
        (["--bacth", "1"], "--bacth is no setting"),
    ],
)
def test_mistakes_are_named(command, arguments, words):
    with pytest.raises(ConfigError, match=words):
        command.run(["--config", str(ROOT / "launch" / "recipes" / "quickstart.yaml"), *arguments])
