"""Hugging Face export of a possibly partitioned model, shard by shard, then verified. Entry: `export_model`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ds_stochdpo.engine.completeness import as_readable_as_others, flush_file, flush_folder, write_json
from ds_stochdpo.engine.distributed import Ranks
from ds_stochdpo.errors import ExportError

INDEX_NAME = "model.safetensors.index.json"
PARTIAL_NAME = ".export-partial"


def export_model(
    lm: PreTrainedModel,
    output_dir: Path,
    ranks: Ranks,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write config, weights and tokenizer so that plain transformers loads them. Collective.

    Rank 0 holds one shard and one tensor at most beside the model. Weights keep the dtype they were trained in (bf16
    for bf16 training). Files get their names only when all of them are written and verified; a model that was in the
    folder is complete until then. A process that is killed while several files get their names leaves no model.

    Args:
        lm: The causal LM inside the two-lane model.
        output_dir: Folder to write; made if missing.
        ranks: This process among the others.
        tokenizer: Saved too if given.
        max_shard_size: Largest weight file, in bytes or as "5GB".

    Raises:
        ExportError: If the files cannot be written, or, read back, lack a tensor, have another shape, or hold a value
            that is not finite.
    """
    tensors = _tensors_to_save(lm)
    plan = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda t: _full_shape(t).numel() * t.element_size(),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    partial = output_dir / PARTIAL_NAME
    if ranks.is_main:
        # An export that was broken off left its shards there.
        shutil.rmtree(partial, ignore_errors=True)
    problem: str | None = None
    for filename, names in plan.filename_to_tensors.items():
        shard = _gather({name: tensors[name] for name in names}, ranks)
        if ranks.is_main and not problem:
            problem = _write_shard(shard, partial / filename)
        # The next shard is gathered without this one in memory.
        del shard
    if ranks.is_main:
        problem = problem or _find_problem(tensors, plan.tensor_to_filename, partial)
        if problem:
            shutil.rmtree(partial, ignore_errors=True)
        else:
            index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename} if plan.is_sharded else None
            problem = _publish(lm, tokenizer, partial, output_dir, index)
    # Every rank: all of them must learn whether the export holds.
    problem = ranks.from_main(problem)
    if problem:
        raise ExportError(f"export to {output_dir} failed: {problem}.")


def _gather(tensors: dict[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Whole tensors on rank 0, nothing elsewhere."""
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        # Every rank: gathering a partitioned tensor is a collective.
        with _gathered(tensor) as whole:
            if ranks.is_main:
                shard[name] = whole.detach().to("cpu", copy=True).contiguous()
    return shard


def _write_shard(shard: dict[str, Tensor], path: Path) -> str | None:
    """Returns what went wrong: rank 0 has to stay in step, so it raises only where all ranks do."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(shard, path, metadata={"format": "pt"})
        as_readable_as_others(path)
        flush_file(path)
    except (OSError, SafetensorError) as error:
        size = sum(t.numel() * t.element_size() for t in shard.values())
        return f"{path.name} ({size} bytes) cannot be written ({error})"
    return None


def _publish(
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    partial: Path,
    output_dir: Path,
    index: dict[str, Any] | None,
) -> str | None:
    """Give the verified files their names, in place of an older model's; returns what went wrong.

    Where several files have to change, the index goes first and comes last: a mix of two models does not load.
    """
    try:
        written = {path.name for path in partial.iterdir()}
        if index is not None:
            (output_dir / INDEX_NAME).unlink(missing_ok=True)
        for path in partial.iterdir():
            os.replace(path, output_dir / path.name)
        partial.rmdir()
        if index is None:
            (output_dir / INDEX_NAME).unlink(missing_ok=True)
        else:
            write_json(output_dir / INDEX_NAME, index)
        flush_folder(output_dir)
        for stale in {*output_dir.glob("model*.safetensors")} - {output_dir / name for name in written}:
            stale.unlink()
        _save_config(lm, output_dir)
        if tokenizer is not None:
            tokenizer.save_pretrained(output_dir)
    except OSError as error:
        return f"{output_dir} cannot be written ({error})"
    return None


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
