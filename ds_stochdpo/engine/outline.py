"""A model without its weights: its config from disk, its modules on the meta device. Entry: `model_outline`."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ds_stochdpo.engine.loading import load_tokenizer
from ds_stochdpo.errors import ConfigError


@dataclass(frozen=True, eq=False)
class ModelOutline:
    """What is known of a model before its weights are there.

    Attributes:
        lm: The causal LM on the meta device: shapes, and no memory.
        source: Where its config was read.
        tokenizer: Its tokenizer; None where the model is not on disk.
    """

    lm: PreTrainedModel
    source: str
    tokenizer: PreTrainedTokenizerBase | None

    @property
    def num_weights(self) -> int:
        """Weights of the model; tied ones count once."""
        return sum(parameter.numel() for parameter in self.lm.parameters())

    def rebuilt(self) -> PreTrainedModel:
        """Another model of the same config on the meta device, for whoever will change it."""
        return _on_meta(copy.deepcopy(self.lm.config))


def model_outline(model_name_or_path: str, config_file: str | None) -> ModelOutline:
    """Build a model on the meta device without reaching the network.

    Args:
        model_name_or_path: Folder, or hub name of a model that may be in the cache.
        config_file: A config.json to use where the model is not on disk; None: there is none.

    Returns:
        The outline.

    Raises:
        ConfigError: If neither gives a config, or transformers has no causal LM for it.
    """
    if not model_name_or_path:
        raise ConfigError("model_name_or_path is empty; name a folder or a hub model.")
    try:
        model_config = AutoConfig.from_pretrained(model_name_or_path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        if config_file is None:
            raise ConfigError(
                f"model_name_or_path is {model_name_or_path!r}, which is not on disk, and a dry run downloads nothing; "
                "name a config.json of that architecture in dry_run_model_config."
            ) from error
        model_config, source, tokenizer = _read_config(Path(config_file)), config_file, None
    else:
        source, tokenizer = model_name_or_path, _tokenizer_on_disk(model_name_or_path)
    try:
        lm = _on_meta(model_config)
    except ValueError as error:
        raise ConfigError(
            f"{source}: transformers builds no causal LM from it: {str(error).splitlines()[0]}"
        ) from error
    return ModelOutline(lm, source, tokenizer)


def _on_meta(model_config: Any) -> PreTrainedModel:
    with torch.device("meta"):
        lm: PreTrainedModel = AutoModelForCausalLM.from_config(model_config)
    return lm


def _tokenizer_on_disk(model_name_or_path: str) -> PreTrainedTokenizerBase | None:
    if Path(model_name_or_path).is_dir():
        # A folder is whole or wrong; of a hub model the cache may hold the config alone.
        return load_tokenizer(model_name_or_path)
    try:
        return AutoTokenizer.from_pretrained(model_name_or_path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError):
        return None


def _read_config(path: Path) -> Any:
    try:
        return AutoConfig.for_model(**json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"dry_run_model_config is {str(path)!r}, which cannot be read: {error.strerror}.") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"dry_run_model_config is {str(path)!r}, which is no config.json of a model: {str(error).splitlines()[0]}"
        ) from error
