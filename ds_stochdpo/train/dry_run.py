"""A run's settings, checked and turned into numbers: nothing is downloaded or trained. Entry: `dry_run`."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.data import PreferencePair, load_pairs, open_stream
from ds_stochdpo.data.rows import find_source
from ds_stochdpo.data.truncate import resolve_limits
from ds_stochdpo.engine import check_token_ids, resolve_settings
from ds_stochdpo.engine.outline import ModelOutline, model_outline
from ds_stochdpo.engine.settings import fill_model_sizes, zero_stage
from ds_stochdpo.errors import ConfigError, DataError
from ds_stochdpo.model import family_of
from ds_stochdpo.pruning import ModelShape
from ds_stochdpo.pruning.memory import (
    Held,
    StatePlan,
    activation_bytes,
    head_bytes,
    model_state,
    unchunked_logits_bytes,
)
from ds_stochdpo.train.forecast import MOST_STEPS, Forecast, assumed_pairs, forecast
from ds_stochdpo.train.loop import plan_schedule
from ds_stochdpo.train.output_dir import claim_for
from ds_stochdpo.train.trackers import check_trackers

FEWEST_PAIRS = 64
"""Assumed pairs that are drawn at least, so that means over the draws settle."""
GIB = 2**30
MOMENTS = {"adam": 2, "adamw": 2, "sgd": 0}
"""fp32 values of optimizer state a weight; optimizers that are not here are taken for Adam."""


def dry_run(config: StochDPOConfig) -> str:
    """Check a run's settings and predict its sizes.

    The model is built on the meta device from its config on disk, or from `dry_run_model_config`. Pairs are read where
    file and tokenizer are on disk; else each is assumed to fill `max_length`.

    Args:
        config: The settings; `dry_run_ranks` says for how many ranks.

    Returns:
        The plan as lines of text.

    Raises:
        StochDPOError: If training would refuse the settings, the model or the pairs.
    """
    world_size = config.dry_run_ranks or int(os.environ.get("WORLD_SIZE", "1"))
    check_trackers(config)
    claim_for(config)
    resolved, ds = resolve_settings(config, config.deepspeed, world_size=world_size)
    outline = model_outline(config.model_name_or_path, config.dry_run_model_config)
    shape = family_of(outline.lm).shape(outline.lm.config)
    ds = fill_model_sizes(ds, shape.hidden)
    pairs, num_pairs, told = _pairs(resolved, outline, world_size)
    counts = forecast(pairs, resolved, shape, world_size=world_size)
    state = _state_plan(resolved, ds, world_size)
    lines = ["dry run: settings are valid; nothing was downloaded or trained", ""]
    lines += _head_lines(resolved, outline, state, told)
    lines += _step_lines(resolved, counts, world_size, num_pairs)
    lines += ["", *_token_lines(counts), "", *_memory_lines(resolved, outline.num_weights, shape, state, counts)]
    return "\n".join(lines)


def _pairs(
    config: StochDPOConfig, outline: ModelOutline, world_size: int
) -> tuple[list[PreferencePair], int | None, str]:
    """Pairs to draw, their number in the set if that is known, and where they come from."""
    context = getattr(outline.lm.config, "max_position_embeddings", None)
    limits = resolve_limits(config, context, None)
    missing = _missing_files(config)
    assert config.per_device_train_batch_size is not None
    assert config.gradient_accumulation_steps is not None
    pairs_per_step = world_size * config.per_device_train_batch_size * config.gradient_accumulation_steps
    if missing is None and outline.tokenizer is not None:
        if config.streaming:
            stream = open_stream(config, outline.tokenizer, context_length=context)
            pairs = list(itertools.islice(stream.read(0), MOST_STEPS * pairs_per_step))
            num_pairs, told = None, f"the first {len(pairs)} pairs of {config.dataset_name}, a stream"
        else:
            pairs = load_pairs(config, outline.tokenizer, context_length=context).pairs
            num_pairs, told = len(pairs), f"{len(pairs)} pairs of {config.dataset_name}"
        if config.dataset_test_split is not None:
            load_pairs(config, outline.tokenizer, split="test", context_length=context)
        largest = max(int(max(p.prompt_ids.max(), p.chosen_ids.max(), p.rejected_ids.max())) for p in pairs)
        check_token_ids(largest, outline.lm, len(outline.tokenizer))
        return pairs, num_pairs, told
    if limits.max_length is None:
        raise ConfigError("max_length is not set and the model names no context; set it, for a dry run needs a length.")
    count = pairs_per_step * -(-FEWEST_PAIRS // pairs_per_step)
    pairs = assumed_pairs(config, limits.max_length, count)
    prompt, response = len(pairs[0].prompt_ids), len(pairs[0].chosen_ids)
    why = missing or f"no tokenizer on disk for {config.dataset_name}"
    return pairs, None, f"{why}: every pair assumed to have {prompt} + {response} + {response} tokens (max_length)"


def _missing_files(config: StochDPOConfig) -> str | None:
    """Why the pairs cannot be read without the network; None: they can."""
    for split in ("train", "test") if config.dataset_test_split is not None else ("train",):
        try:
            source = find_source(config, split)
        except DataError as error:
            # A path may well exist only where the run will be.
            return str(error).rstrip(".")
        if not source.files and not Path(source.name).expanduser().is_dir():
            return f"{source.name} is a hub name, not read"
    return None


def _state_plan(config: StochDPOConfig, ds: dict[str, Any], world_size: int) -> StatePlan:
    zero = ds.get("zero_optimization", {})
    optimizer = ds["optimizer"]

    def is_offloaded(section: str) -> bool:
        return (zero.get(section) or {}).get("device", "none") != "none"

    moments = MOMENTS.get(str(optimizer["type"]).lower(), 2)
    return StatePlan(
        zero_stage=zero_stage(ds),
        world_size=world_size,
        weight_bytes=2 if config.bf16 else 4,
        optimizer_on_host=is_offloaded("offload_optimizer"),
        weights_on_host=is_offloaded("offload_param"),
        moments=moments or int(bool(optimizer.get("params", {}).get("momentum"))),
        sub_group=int(zero.get("sub_group_size", 10**9)),
        max_live=int(zero.get("stage3_max_live_parameters", 10**9)),
    )


def _head_lines(config: StochDPOConfig, outline: ModelOutline, state: StatePlan, told: str) -> list[str]:
    model, name = outline.lm.config, config.model_name_or_path
    source = "" if outline.source == name else f" (not on disk: sizes from {outline.source})"
    embedding: Any = outline.lm.get_input_embeddings()
    rows = embedding.num_embeddings
    places = [n for n, on in (("optimizer", state.optimizer_on_host), ("weights", state.weights_on_host)) if on]
    plan = config.pruning
    branch = f"branch {plan.branch}" + (f" ({plan.branch_balance})" if plan.branch == "single" else "")
    return [
        f"model           {name}{source}",
        f"                {model.model_type}, {outline.num_weights:,} parameters, {rows:,} embedding rows",
        f"ranks           {state.world_size}, ZeRO stage {state.zero_stage}, {'bf16' if config.bf16 else 'fp32'}"
        + (f", {' and '.join(places)} on the host" if places else ""),
        f"pairs           {told}",
        f"pruning         position_keep {plan.position_keep:g} ({plan.position_sampler}), prefix_keep "
        f"{plan.prefix_keep:g} ({plan.prefix_sampler}), {branch}",
    ]


def _step_lines(config: StochDPOConfig, counts: Forecast, world_size: int, num_pairs: int | None) -> list[str]:
    schedule = plan_schedule(config, num_pairs=num_pairs or 1, world_size=world_size)
    budget = config.max_tokens_per_micro_batch
    cut = f"cut at {budget} tokens" if budget else "no token budget"
    pairs, steps = config.per_device_train_batch_size, config.gradient_accumulation_steps
    lines = [
        f"optimizer step  {schedule.pairs_per_step} pairs = {world_size} ranks x {pairs} x {steps}; "
        f"{counts.micro_batches} micro-batch(es) a rank, {cut}"
    ]
    if num_pairs is not None or config.streaming:
        lines.append(f"steps           {schedule.total_steps}, {schedule.warmup_steps} of them warm-up")
    return lines


def _token_lines(counts: Forecast) -> list[str]:
    rows = [
        ("tokens run", counts.stock_tokens, counts.executed),
        ("tokens back-propagated", counts.stock_tokens, counts.backward),
        ("positions scored", counts.stock_scored, counts.scored),
        ("work, in 1e12 operations", counts.stock_flops / 1e12, counts.flops / 1e12),
    ]
    title = f"a pair, mean of {counts.num_pairs} draws"
    lines = [f"{title:<44}{'stock DPO':>12}{'this plan':>12}{'share':>8}"]
    for name, stock, ours in rows:
        lines.append(f"  {name:<42}{stock:>12,.1f}{ours:>12,.1f}{ours / stock:>8.3f}")
    return [*lines, "  stock DPO: no padding, no shared prompt; its reference is left out, as is a cached one"]


def _memory_lines(
    config: StochDPOConfig, num_weights: int, shape: ModelShape, state: StatePlan, counts: Forecast
) -> list[str]:
    width = state.weight_bytes
    kinds = model_state(num_weights, state)
    if config.reference == "online":
        # Always sharded, whatever the policy's stage; taken to be as large as the policy.
        share = -(-num_weights // state.world_size) * width
        kinds["weights of the reference"] = Held(host=share) if state.weights_on_host else Held(share)
    size = {"live_tokens": counts.live_tokens, "frozen_tokens": counts.frozen_tokens, "weight_bytes": width}
    layers = {on: activation_bytes(shape, **size, checkpointing=on) for on in (True, False)}
    head = head_bytes(
        shape,
        live_rows=counts.live_rows,
        chunk_rows=config.score_chunk_rows,
        recompute=config.score_recompute,
        weight_bytes=width,
    )
    kinds["activations of the layers"] = Held(layers[config.gradient_checkpointing])
    kinds["head: logits of one chunk"] = Held(head["chunk"] + head["kept"])
    kinds["head: gradient of its matrix"] = Held(head["gradient"])
    lines = [f"{'GiB of one rank':<44}{'device':>12}{'host':>12}"]
    lines += [f"  {name:<42}{_gib(held.device):>12}{_gib(held.host):>12}" for name, held in kinds.items()]
    resting = sum(h.device for n, h in kinds.items() if not (h.in_step or n.startswith(("activations", "head"))))
    in_step = resting + sum(h.device for h in kinds.values() if h.in_step)
    backward = sum(h.device for h in kinds.values() if not h.in_step)
    host = sum(h.host for h in kinds.values())
    lines.append(f"  {'peak: the larger of backward and step':<42}{_gib(max(backward, in_step)):>12}{_gib(host):>12}")
    other = not config.gradient_checkpointing
    logits = unchunked_logits_bytes(shape, rows=counts.live_rows)
    return [
        *lines,
        f"  largest micro-batch: {counts.live_tokens} tokens with gradient, {counts.frozen_tokens} without, "
        f"{counts.live_rows} scored rows with gradient",
        f"  gradient_checkpointing {str(config.gradient_checkpointing).lower()}; {str(other).lower()} would hold "
        f"{_gib(layers[other])} GiB of activations; logits without chunks {_gib(logits)} GiB",
        "  not counted: communication buffers, allocator waste, the device's own context; activations are a model",
    ]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.2f}" if num_bytes else "-"
