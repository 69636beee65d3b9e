"""Whole runs inside the test's own process: models and pairs on disk, settings in, the files of a run out."""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from safetensors.torch import load_file

from ds_stochdpo import StochDPOConfig
from tests.tiny import tiny_gpt2, tiny_llama, tiny_tokenizer, write_rows

MODELS = {
    "llama": tiny_llama,
    "other llama": lambda: tiny_llama(seed=1),
    # Weights so large that every token of a response has a log-prob of its own.
    "wide": lambda: tiny_llama(initializer_range=0.2),
    "gpt2": tiny_gpt2,
    "gpt2 with dropout": lambda: tiny_gpt2(dropout=0.1),
}
PRUNED = {"position_keep": 0.5, "prefix_keep": 0.5, "branch": "single"}


def write_models(folder):
    """Write every model of `MODELS`, each with the tokenizer."""
    tokenizer = tiny_tokenizer()
    for name, make in MODELS.items():
        make().save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def deepspeed_json(stage=3, **sections):
    """DeepSpeed settings under which even a tiny model is sharded at stage 3."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **sections.pop("zero_optimization", {})}
    return {"zero_optimization": zero, **sections}


@contextlib.contextmanager
def group_that_stands():
    """Runs take the process group that is there, and draw no report."""
    from ds_stochdpo.engine.distributed import Ranks
    from ds_stochdpo.train import run

    @contextlib.contextmanager
    def process_group(*_, **__):
        yield Ranks()

    with mock.patch.multiple(run, process_group=process_group, write_report=lambda *_: None):
        yield


@dataclass(frozen=True)
class Done:
    """What a run left in its output_dir."""

    folder: Path

    def lines(self, name="metrics.jsonl"):
        return [json.loads(line) for line in (self.folder / name).read_text(encoding="utf-8").splitlines()]

    @property
    def steps(self):
        """Training lines without what a clock or the machine decides."""
        kept = [line for line in self.lines() if "loss" in line]
        return [{k: v for k, v in line.items() if k.split("/")[0] not in ("time", "memory")} for line in kept]

    @property
    def weights(self):
        return load_file(self.folder / "model.safetensors")


class Jobs:
    """Runs in one folder; `folder / name` of `MODELS` is a model."""

    def __init__(self, folder):
        self.folder = folder
        self._count = 0
        write_models(folder)

    def rows(self, rows):
        """Write rows to a file of their own and return its path."""
        self._count += 1
        return str(write_rows(self.folder / f"rows{self._count}.jsonl", rows))

    def config(self, model, rows, **settings):
        """Settings of a run of `model` on `rows` in a folder of its own."""
        path = self.rows(rows)
        defaults = {
            "model_name_or_path": str(self.folder / model),
            "dataset_name": path,
            "output_dir": str(self.folder / f"out{self._count}"),
            "reference_cache_dir": str(self.folder / "cache"),
            # Adam turns rounding in a gradient near 0 into a good part of this.
            "learning_rate": 1e-4,
            "per_device_train_batch_size": 4,
        }
        if "reference_model" in settings:
            settings["ref_model_name_or_path"] = str(self.folder / settings.pop("reference_model"))
        return StochDPOConfig(**{**defaults, **settings})

    def run(self, model, rows, ds=None, **settings):
        """Train; returns what the run left behind."""
        from ds_stochdpo.train import run_training

        config = self.config(model, rows, **settings)
        path = Path(config.output_dir).with_suffix(".json")
        path.write_text(json.dumps(ds or deepspeed_json()), encoding="utf-8")
        config.deepspeed = str(path)
        with group_that_stands():
            run_training(config)
        return Done(Path(config.output_dir))

    def engine(self, model, rows, ds=None, **settings):
        """An engine on a model, and the pairs of `rows` with their reference log-probs."""
        import torch

        from ds_stochdpo import add_reference, initialize
        from ds_stochdpo.engine import load_policy, resolve_settings

        config = self.config(model, rows, **settings)
        ds = ds or deepspeed_json()
        _, resolved = resolve_settings(config, ds, world_size=1)
        lm = load_policy(config.model_name_or_path, resolved, bf16=bool(config.bf16))
        engine = initialize(model=lm, config=config, deepspeed=ds, ref_model=self.reference(config, lm.dtype))
        assert next(lm.parameters()).dtype == (torch.bfloat16 if config.bf16 else torch.float32)
        pairs = self.pairs(config)
        return engine, add_reference(engine, pairs) if config.reference == "cached" else pairs

    def reference(self, config, dtype):
        """The reference model that settings ask for, if it is one beside the policy."""
        from transformers import AutoModelForCausalLM

        name = config.ref_model_name_or_path or (config.model_name_or_path if config.reference == "online" else None)
        return None if name is None else AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval()

    @staticmethod
    def pairs(config):
        """The pairs of settings, by the model's tokenizer."""
        from ds_stochdpo import load_pairs
        from ds_stochdpo.engine import load_tokenizer

        return load_pairs(config, load_tokenizer(config.model_name_or_path), context_length=256, progress=False).pairs


def assert_same(run, other, *, metrics=1e-5, weights=1e-6):
    """Loss, margin and gradient norm of every step, and the final weights, agree."""
    import pytest

    for one, two in zip(run.steps, other.steps, strict=True):
        for name in ("loss", "rewards/margins", "grad_norm"):
            assert one[name] == pytest.approx(two[name], rel=metrics, abs=1e-7), (name, one["step"])
    ours, theirs = run.weights, other.weights
    assert ours.keys() == theirs.keys()
    gap = max(float((ours[k] - theirs[k]).abs().max()) for k in ours)
    assert gap <= weights, gap
