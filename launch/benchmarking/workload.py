"""What is measured: a model of a given depth and a batch of preference pairs. Entry: `Workload`, `load_workload`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.data import PreferencePair, load_pairs
from ds_stochdpo.data.rows import find_source
from ds_stochdpo.engine import load_tokenizer
from ds_stochdpo.errors import ConfigError
from ds_stochdpo.model import family_of_config
from ds_stochdpo.pruning import ModelShape

SYNTHETIC = "synthetic:"
"""Prefix of a workload that is made up: synthetic:PROMPTxRESPONSE, lengths in tokens, all pairs alike."""


@dataclass(frozen=True)
class Workload:
    """A batch of pairs.

    Attributes:
        name: File, or `synthetic:PROMPTxRESPONSE`.
        pairs: Pairs of one optimizer step.
        path: The file; None for made-up pairs.
    """

    name: str
    pairs: list[PreferencePair]
    path: Path | None = None

    def facts(self) -> dict[str, object]:
        """Name, number of pairs, and tokens of each pair: [prompt, chosen, rejected]."""
        lengths = [[len(p.prompt_ids), len(p.chosen_ids), len(p.rejected_ids)] for p in self.pairs]
        return {"name": self.name, "pairs": len(self.pairs), "lengths": lengths}


def load_workload(name: str, config: StochDPOConfig, num_pairs: int) -> Workload:
    """The first `num_pairs` pairs of a file, or made-up ones of equal length.

    Raises:
        ConfigError: If the file has fewer pairs or the lengths cannot be read.
        DataError: If the file cannot be used.
    """
    if name.startswith(SYNTHETIC):
        return Workload(name, _synthetic(name, _model_config(config).vocab_size, num_pairs))
    settings = StochDPOConfig(**{**config.to_dict(), "dataset_name": name, "max_samples": None})
    pairs = load_pairs(settings, load_tokenizer(config.model_name_or_path), progress=False).pairs[:num_pairs]
    if len(pairs) < num_pairs:
        raise ConfigError(f"{name} has {len(pairs)} pairs, but the batch has {num_pairs}; lower --batch_size.")
    return Workload(Path(name).name, pairs, Path(name))


def _synthetic(name: str, vocab: int, num_pairs: int) -> list[PreferencePair]:
    try:
        prompt, response = (int(part) for part in name.removeprefix(SYNTHETIC).split("x"))
    except ValueError:
        raise ConfigError(f"workload {name!r}: write {SYNTHETIC}PROMPTxRESPONSE, such as {SYNTHETIC}256x256.") from None
    rng = np.random.default_rng(0)

    def pair(index: int) -> PreferencePair:
        parts = [rng.integers(0, vocab, length) for length in (prompt, response, response)]
        # A shared response start would be scored once and spoil the equal lengths.
        parts[2][0] = (parts[1][0] + 1) % vocab
        return PreferencePair(index, *parts, source=name)

    return [pair(index) for index in range(num_pairs)]


def _model_config(config: StochDPOConfig) -> AutoConfig:
    path = Path(config.model_name_or_path)
    if path.suffix == ".json":
        return AutoConfig.from_pretrained(path.parent, _configuration_file=path.name)
    return AutoConfig.from_pretrained(path)


def build_model(config: StochDPOConfig, num_layers: int, device: torch.device) -> PreTrainedModel:
    """The model of `model_name_or_path`.

    Args:
        config: Names the model; a config.json alone will do if layers are cut.
        num_layers: Layers to keep, with random weights from a fixed seed; 0: all, with the weights on disk.
        device: Where it goes; bfloat16 on a GPU, float32 elsewhere.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if not num_layers:
        return AutoModelForCausalLM.from_pretrained(config.model_name_or_path, dtype=dtype).to(device).train()
    shape = _model_config(config)
    shape.num_hidden_layers = num_layers
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(shape, dtype=dtype).to(device).train()


def model_shape(config: StochDPOConfig, num_layers: int) -> ModelShape:
    """Sizes that the work of a step depends on, without loading weights."""
    model_config = _model_config(config)
    if num_layers:
        model_config.num_hidden_layers = num_layers
    return family_of_config(model_config).shape(model_config)


def raw_rows(workload: Workload) -> list[dict[str, Any]]:
    """prompt, chosen and rejected of the batch's pairs as their file has them."""
    assert workload.path is not None
    source = find_source(StochDPOConfig(dataset_name=str(workload.path)), "train")
    wanted = [pair.pair_id for pair in workload.pairs]
    rows = [row for row, _ in source.rows(max(wanted) + 1)]
    keys = ("prompt", "chosen", "rejected")
    if any(key not in rows[i] for i in wanted for key in keys):
        raise ConfigError(f"{workload.path} lacks one of {', '.join(keys)}, which TRL is given; leave out --trl.")
    return [{key: rows[i][key] for key in keys} for i in wanted]


def save_model(config: StochDPOConfig, num_layers: int, folder: Path) -> None:
    """Put the model that is measured, and its tokenizer, where another program can load them."""
    build_model(config, num_layers, torch.device("cpu")).save_pretrained(folder)
    load_tokenizer(config.model_name_or_path).save_pretrained(folder)
