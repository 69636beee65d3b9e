"""Hugging Face export of a possibly partitioned model, shard by shard, then verified. Entry: `export_model`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import deepspeed
import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ds_stochdpo.engine.distributed import Ranks
from ds_stochdpo.errors import ExportError

MAX_SHARD_SIZE = "5GB"
INDEX_NAME = "model.safetensors.index.json"


def export_model(
    lm: PreTrainedModel,
    output_dir: Path,
    ranks: Ranks,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> None:
    """Write config, weights and tokenizer so that plain transformers loads them. Collective.

    Rank 0 holds one shard and one tensor at most beside the model. Weights keep the dtype they were trained in (bf16
    for bf16 training).

    Args:
        lm: The causal LM inside the two-lane model.
        output_dir: Folder to write; made if missing.
        ranks: This process among the others.
        tokenizer: Saved too if given.
        max_shard_size: Largest weight file, in bytes or as "5GB".

    Raises:
        ExportError: If the files, read back, lack a tensor, have another shape, or hold a value that is not finite.
    """
    tensors = _tensors_to_save(lm)
    plan = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda t: _full_shape(t).numel() * t.element_size(),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    if ranks.is_main:
        output_dir.mkdir(parents=True, exist_ok=True)
        for stale in [*output_dir.glob("model*.safetensors"), output_dir / INDEX_NAME]:
            stale.unlink(missing_ok=True)
    for filename, names in plan.filename_to_tensors.items():
        _write_shard(output_dir / filename, {name: tensors[name] for name in names}, ranks)
    if ranks.is_main:
        if plan.is_sharded:
            index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
            (output_dir / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        _save_config(lm, output_dir)
        if tokenizer is not None:
            tokenizer.save_pretrained(output_dir)
    problem = _find_problem(tensors, plan.tensor_to_filename, output_dir) if ranks.is_main else None
    # Every rank: all of them must learn whether the export holds.
    problem = ranks.from_main(problem)
    if problem:
        raise ExportError(f"export to {output_dir} failed: {problem}.")


def _write_shard(path: Path, tensors: dict[str, Tensor], ranks: Ranks) -> None:
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        # Every rank: gathering a partitioned tensor is a collective.
        with _gathered(tensor) as whole:
            if ranks.is_main:
                shard[name] = whole.detach().to("cpu", copy=True).contiguous()
    if ranks.is_main:
        save_file(shard, path, metadata={"format": "pt"})


def _tensors_to_save(lm: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, a tied tensor only under its first name."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    persistent = set(lm.state_dict().keys())
    named = [*lm.named_parameters(remove_duplicate=True), *((n, b) for n, b in lm.named_buffers() if n in persistent)]
    for name, tensor in named:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor
    return tensors


def _full_shape(tensor: Tensor) -> torch.Size:
    return torch.Size(getattr(tensor, "ds_shape", tensor.shape))


@contextmanager
def _gathered(tensor: Tensor) -> Iterator[Tensor]:
    if hasattr(tensor, "ds_id"):
        with deepspeed.zero.GatheredParameters([tensor], modifier_rank=None):
            yield tensor.data
    else:
        yield tensor


def _save_config(lm: PreTrainedModel, output_dir: Path) -> None:
    lm.config.architectures = [type(lm).__name__]
    lm.config.save_pretrained(output_dir)
    if lm.generation_config is not None:
        lm.generation_config.save_pretrained(output_dir)


def _find_problem(tensors: dict[str, Tensor], files: dict[str, str], output_dir: Path) -> str | None:
    """First way in which the written files differ from the model, or None."""
    for filename in sorted(set(files.values())):
        with safe_open(output_dir / filename, framework="pt") as stored:
            names = {name for name, file in files.items() if file == filename}
            if set(stored.keys()) != names:
                return f"{filename} holds other tensors than planned: {sorted(set(stored.keys()) ^ names)[:5]}"
            for name in stored.keys():
                value = stored.get_tensor(name)
                if value.shape != _full_shape(tensors[name]):
                    return f"{name} has shape {tuple(value.shape)}, not {tuple(_full_shape(tensors[name]))}"
                if not torch.isfinite(value).all():
                    return f"{name} holds values that are not finite"
    return None
