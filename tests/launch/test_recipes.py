"""Every recipe passes a dry run on a machine without network, model and data; what is wrong is refused there too."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ds_stochdpo import ConfigError, ModelError, StochDPOConfig
from ds_stochdpo.engine.outline import model_outline
from ds_stochdpo.planning import dry_run
from ds_stochdpo.train import run_training
from tests.tiny import tiny_llama, tiny_tokenizer, write_pairs

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "launch" / "recipes").glob("*.yaml"))
SHAPES = ROOT / "launch" / "recipes" / "shapes"
PARAMETERS = {"llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496, "smollm2-135m": 134_515_008}
"""As their model cards and files say."""


def launched(recipe, tmp_path, *flags):
    """A dry run as a user starts it, with an empty hub cache and no network."""
    cache = tmp_path / "hub"
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(cache), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": str(ROOT), "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}  # fmt: skip
    command = [
        sys.executable,
        "launch/train.py",
        "--config",
        str(recipe),
        "--output_dir",
        str(tmp_path / "run"),
        *flags,
    ]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=200)
    files = [path for path in cache.rglob("*") if path.is_file()] if cache.exists() else []
    assert not [f for f in files if f.suffix in (".safetensors", ".json", ".parquet", ".jsonl")], "a download"
    assert not (tmp_path / "run").exists()
    return done


@pytest.mark.multiproc
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_passes_a_dry_run(recipe, tmp_path):
    done = launched(recipe, tmp_path, "--dry_run")
    assert done.returncode == 0, done.stderr[-3000:]
    settings = yaml.safe_load(recipe.read_text())
    assert re.search(rf"^ranks +{settings['dry_run_ranks']}, ZeRO stage 3", done.stdout, re.MULTILINE)
    for word in ("embedding rows", "tokens back-propagated", "fp32 master weights", "activations kept",
                 "beside them: head", "peak", "rows that meet the head"):  # fmt: skip
        assert word in done.stdout
    num_weights = PARAMETERS[Path(settings["dry_run_model_config"]).stem]
    assert f"{num_weights:,} parameters" in done.stdout


@pytest.mark.multiproc
def test_a_dry_run_refuses_what_training_would(tmp_path):
    done = launched(RECIPES[0], tmp_path, "--dry_run", "true", "--prefix_keep", "0.1")
    assert done.returncode == 2
    assert "prefix_keep is 0.1" in done.stderr.splitlines()[-1]
    assert done.stdout == ""


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_headed_by_its_command_and_carries_the_prunings(recipe):
    text = recipe.read_text()
    head = "".join(line for line in text.splitlines()[:8] if line.startswith("#"))
    assert f"--config launch/recipes/{recipe.name}" in head
    settings = yaml.safe_load(text)
    for key in ("position_keep", "position_sampler", "prefix_keep", "prefix_sampler", "prefix_min_survival", "branch",
                "branch_prob", "branch_balance", "deepspeed"):  # fmt: skip
        assert key in settings
    assert settings["deepspeed"].startswith("ds_configs/")


@pytest.mark.parametrize("name", PARAMETERS)
def test_shapes_have_the_parameters_of_their_models(name):
    outline = model_outline("not/on-disk", str(SHAPES / f"{name}.json"))
    assert outline.num_weights == PARAMETERS[name]
    assert next(outline.lm.parameters()).is_meta
    assert outline.tokenizer is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dry")
    tokenizer = tiny_tokenizer()
    tiny_llama(len(tokenizer)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_pairs(folder / "pairs.jsonl", 10)
    return folder


def settings_of(folder, **settings):
    base = {"model_name_or_path": str(folder / "model"), "dataset_name": str(folder / "pairs.jsonl"),
            "output_dir": str(folder / "out"), "dry_run": True, "per_device_train_batch_size": 2}  # fmt: skip
    return StochDPOConfig(**{**base, **settings})


def test_local_model_and_pairs_are_read(folder):
    plan = dry_run(settings_of(folder, dry_run_ranks=2, warmup_ratio=0.5, branch="single"))
    assert f"10 pairs of {folder / 'pairs.jsonl'}" in plan
    assert "a pair, mean of 10 draws" in plan
    assert re.search(r"steps +3, 2 of them warm-up", plan)
    assert "not on disk" not in plan
    assert not (folder / "out").exists()


def test_an_earlier_run_is_told_and_no_obstacle(folder, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    settings = settings_of(folder, output_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="holds an earlier run"):
        run_training(dataclasses.replace(settings, dry_run=False))
    lines = dry_run(settings).splitlines()
    assert lines[1].startswith(f"but a run would be refused now: output_dir is {tmp_path}, which holds an earlier run")
    assert lines[2:] == dry_run(settings_of(folder)).splitlines()[1:]


def test_ranks_are_those_started_unless_said_otherwise(folder, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "8 pairs = 4 ranks x 2 x 1" in dry_run(settings_of(folder))
    assert "6 pairs = 3 ranks x 2 x 1" in dry_run(settings_of(folder, dry_run_ranks=3))


def test_offload_is_predicted_on_the_host(folder):
    plan = dry_run(settings_of(folder, deepspeed=str(ROOT / "ds_configs" / "zero3_offload.json")))
    assert "optimizer and weights on the host" in plan
    row = next(line for line in plan.splitlines() if "optimizer moments" in line)
    assert row.split()[-2] == "-"


def test_an_online_reference_is_counted(folder):
    assert "weights of the reference" not in dry_run(settings_of(folder))
    assert "weights of the reference" in dry_run(settings_of(folder, reference="online"))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"model_name_or_path": "some/hub-model"}, r"some/hub-model.*not on disk.*dry_run_model_config"),
        ({"model_name_or_path": ""}, "model_name_or_path is empty"),
        ({"model_name_or_path": "some/hub-model", "dry_run_model_config": "none.json"}, r"none\.json.*cannot be read"),
        ({"max_length": 512}, "max_length is 512, but the model has 256 positions"),
        ({"deepspeed": "no.json"}, r"no\.json.*cannot be read"),
        ({"report_to": "comet_ml"}, "pip install comet_ml"),
    ],
)
def test_mistakes_are_named(folder, settings, match, monkeypatch):
    monkeypatch.setitem(sys.modules, "comet_ml", None)
    with pytest.raises(ConfigError, match=match):
        dry_run(settings_of(folder, **settings))


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        ("{", ConfigError, "no config.json of a model"),
        ('{"vocab_size": 5}', ConfigError, "no config.json of a model"),
        ('{"model_type": "bert"}', ModelError, "bert"),
    ],
)
def test_a_config_that_is_no_supported_model_is_refused(folder, tmp_path, text, error, match):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(error, match=match):
        dry_run(settings_of(folder, model_name_or_path="some/hub-model", dry_run_model_config=str(path)))


def test_a_folder_without_tokenizer_is_refused_and_not_replaced(folder, tmp_path):
    (tmp_path / "config.json").write_text((folder / "model" / "config.json").read_text())
    with pytest.raises(ConfigError, match="no tokenizer loads from it"):
        dry_run(
            settings_of(
                folder,
                model_name_or_path=str(tmp_path),
                dry_run_model_config=str(SHAPES / "smollm2-135m.json"),
            )
        )


def test_training_refuses_a_dry_run(folder):
    with pytest.raises(ConfigError, match="dry_run is true"):
        run_training(settings_of(folder))
