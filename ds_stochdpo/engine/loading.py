"""Tokenizer and policy from disk or hub; under ZeRO-3 the weights arrive already partitioned. Entry: `load_policy`."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.deepspeed import HfDeepSpeedConfig
from transformers.utils.hub import cached_file

from ds_stochdpo.engine.settings import fill_model_sizes, zero_stage
from ds_stochdpo.errors import ConfigError, ModelError
from ds_stochdpo.model import family_of_config

logger = logging.getLogger(__name__)

_LONGEST_REASON = 300
_COSMETIC = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")
WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.gguf")


def load_tokenizer(model_name_or_path: str) -> PreTrainedTokenizerBase:
    """Tokenizer of a model.

    Args:
        model_name_or_path: Folder or hub name.

    Returns:
        The tokenizer, unchanged: no pad token is invented, since packed lanes need none.

    Raises:
        ConfigError: If there is none at that place.
    """
    if not model_name_or_path:
        raise ConfigError("model_name_or_path is empty; name a folder or a hub model.")
    is_path = model_name_or_path.startswith((".", "/", "~")) or model_name_or_path.count("/") > 1
    if is_path and not Path(model_name_or_path).is_dir():
        raise ConfigError(f"model_name_or_path is {model_name_or_path!r}; there is no such folder.")
    try:
        return AutoTokenizer.from_pretrained(model_name_or_path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model_name_or_path is {model_name_or_path!r}; no tokenizer loads from it: {_in_one_line(error)}"
        ) from error


def _in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return "it brings Python code of its own, which is never run here"
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."


def load_model_config(model_name_or_path: str) -> Any:
    """Config of a model, without its weights.

    Raises:
        ConfigError: If there is none at that place.
    """
    try:
        return AutoConfig.from_pretrained(model_name_or_path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model_name_or_path is {model_name_or_path!r}; no config loads from it: {_in_one_line(error)}"
        ) from error


def load_policy(model_name_or_path: str, ds: dict[str, Any], *, bf16: bool) -> PreTrainedModel:
    """Policy to train, in the dtype of its computation.

    Collective under ZeRO-3: each rank keeps its share of every tensor and never holds the whole model.

    Args:
        model_name_or_path: Folder or hub name.
        ds: DeepSpeed dict from `resolve_settings`.
        bf16: Load in bfloat16 instead of float32.

    Returns:
        The causal LM in evaluation mode.

    Raises:
        ModelError: If the family is not supported, or if weights are missing, so that new random ones would be trained
            without a word, or if a weight file is cut off or no weight file at all.
    """
    model_config = load_model_config(model_name_or_path)
    family_of_config(model_config, model_name_or_path)
    check_weight_files(model_name_or_path)
    hidden_size = model_config.hidden_size
    # transformers partitions while it loads, for as long as this object lives.
    partitioning = HfDeepSpeedConfig(fill_model_sizes(ds, hidden_size)) if zero_stage(ds) == 3 else None
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model_name_or_path,
        dtype=torch.bfloat16 if bf16 else torch.float32,
        output_loading_info=True,
        trust_remote_code=False,
    )
    lm, report = loaded
    del partitioning
    for problem in ("missing_keys", "mismatched_keys"):
        if report[problem]:
            names = ", ".join(sorted(map(str, report[problem]))[:5])
            raise ModelError(
                f"{model_name_or_path} lacks weights for this model ({problem}: {names}); use a complete folder."
            )
    return lm.eval()


def check_weight_files(model_name_or_path: str) -> None:
    """Refuse safetensors files that are cut off or hold something else, as a pointer to a file left elsewhere.

    Reads only the files' headers. A hub name whose files are not on disk yet passes.

    Raises:
        ModelError: Naming file and size.
    """
    folder = Path(model_name_or_path)
    for path in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
        size = path.stat().st_size
        try:
            with safe_open(path, framework="pt"):
                continue
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"{path} ({size} bytes) is no complete safetensors file ({_in_one_line(error)}); "
                "fetch it again: a small text file in its place is a pointer to the real one."
            ) from error


def weights_digest(model_name_or_path: str) -> str:
    """sha256 over a model's weight files and config: sound under ZeRO-3, where a state dict holds empty shards.

    Args:
        model_name_or_path: Folder or hub name whose files are on disk.

    Returns:
        Hexadecimal digest of the files' names and contents, and of every config entry that can change a score.

    Raises:
        ModelError: If no weight file is found.
    """
    folder = Path(model_name_or_path)
    if not folder.is_dir():
        folder = Path(str(cached_file(model_name_or_path, "config.json"))).parent
    files = sorted(f for pattern in WEIGHT_PATTERNS for f in folder.glob(pattern))
    if not files:
        raise ModelError(f"no weight file ({', '.join(WEIGHT_PATTERNS)}) in {folder}.")
    settings = {k: v for k, v in load_model_config(str(folder)).to_dict().items() if k not in _COSMETIC}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for file in files:
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def check_token_ids(largest_id: int, lm: PreTrainedModel, tokenizer_size: int) -> None:
    """Refuse token ids the embedding has no row for.

    Args:
        largest_id: Largest id in the pairs.
        lm: The model; under ZeRO-3 its embedding may be partitioned.
        tokenizer_size: Entries of the tokenizer, for the message.

    Raises:
        ModelError: If an id has no row.
    """
    rows = cast(nn.Embedding, lm.get_input_embeddings()).num_embeddings
    if largest_id >= rows:
        raise ModelError(
            f"token id {largest_id} >= embedding rows {rows} (the tokenizer has {tokenizer_size} entries); "
            "use the model's own tokenizer, or resize the model's embeddings and save it first."
        )
