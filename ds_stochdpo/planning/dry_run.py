"""A run's settings, checked and turned into numbers: nothing is downloaded or trained. Entry: `dry_run`."""

from __future__ import annotations

import dataclasses
from typing import Any

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.errors import ConfigError
from ds_stochdpo.planning.forecast import Forecast, stock_of, variant_of
from ds_stochdpo.planning.outlook import Outlook, look_ahead
from ds_stochdpo.train.loop import plan_schedule
from ds_stochdpo.train.output_dir import claim_for
from ds_stochdpo.train.trackers import check_trackers

GIB = 2**30


def dry_run(config: StochDPOConfig) -> str:
    """Check a run's settings and predict its sizes.

    The model is built on the meta device from its config on disk, or from `dry_run_model_config`. Pairs are read where
    file and tokenizer are on disk; else each is assumed to fill `max_length`.

    Args:
        config: The settings; `dry_run_ranks` says for how many ranks.

    Returns:
        The plan as lines of text, with what is wrong with output_dir among them.

    Raises:
        StochDPOError: If training would refuse other settings, the model or the pairs.
    """
    check_trackers(config)
    outlook = look_ahead(config)
    counts, stock = outlook.forecast(), outlook.forecast(stock_of(outlook.config))
    lines = ["dry run: settings are valid; nothing was downloaded or trained", ""]
    try:
        claim_for(config)
    except ConfigError as error:
        # Nothing that a plan depends on, and often meant: one looks at a plan again after a first run.
        lines[1:1] = [f"but a run would be refused now: {error}"]
    lines += _head_lines(outlook)
    lines += _step_lines(outlook, counts)
    lines += ["", *_token_lines(counts, stock), "", *_memory_lines(outlook, counts)]
    return "\n".join(lines)


def _head_lines(outlook: Outlook) -> list[str]:
    config, outline, state = outlook.config, outlook.outline, outlook.state
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
        f"pairs           {outlook.told}",
        f"pruning         position_keep {plan.position_keep:g} ({plan.position_sampler}), prefix_keep "
        f"{plan.prefix_keep:g} ({plan.prefix_sampler}), {branch}",
    ]


def _step_lines(outlook: Outlook, counts: Forecast) -> list[str]:
    config, num_pairs, world_size = outlook.config, outlook.num_pairs, outlook.state.world_size
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


def _token_lines(counts: Forecast, stock: Forecast) -> list[str]:
    rows = [
        ("tokens run", stock.work.tokens_executed, counts.work.tokens_executed),
        ("tokens back-propagated", stock.work.tokens_backward, counts.work.tokens_backward),
        ("rows that meet the head", stock.work.tokens_scored, counts.work.tokens_scored),
        ("work, in 1e12 operations", stock.work.total / 1e12, counts.work.total / 1e12),
    ]
    title = f"a pair, mean of {counts.num_pairs} draws"
    lines = [f"{title:<44}{'stock DPO':>12}{'this plan':>12}{'share':>8}"]
    for name, theirs, ours in rows:
        lines.append(f"  {name:<42}{theirs:>12,.1f}{ours:>12,.1f}{ours / theirs:>8.3f}")
    return [*lines, "  stock DPO: both responses padded to the longest of a micro-batch, logits of every row"]


def _memory_lines(outlook: Outlook, counts: Forecast) -> list[str]:
    variant = variant_of(outlook.config)
    other = dataclasses.replace(variant, gradient_checkpointing=not variant.gradient_checkpointing)
    memory, otherwise = (outlook.micro_batch_memory(counts.largest, way) for way in (variant, other))
    kinds, peak = outlook.held(memory), outlook.peak(memory)
    lines = [f"{'GiB of one rank':<44}{'device':>12}{'host':>12}"]
    lines += [f"  {name:<42}{_gib(held.device):>12}{_gib(held.host):>12}" for name, held in kinds.items()]
    lines.append(f"  {'peak: the larger of backward and step':<42}{_gib(peak.device):>12}{_gib(peak.host):>12}")
    work = counts.largest.work
    return [
        *lines,
        f"  largest micro-batch: {work.tokens_backward:.0f} tokens with gradient, "
        f"{work.tokens_executed - work.tokens_backward:.0f} without, {work.tokens_scored:.0f} rows that meet the head",
        f"  gradient_checkpointing {str(variant.gradient_checkpointing).lower()}; "
        f"{str(other.gradient_checkpointing).lower()} would hold {_gib(otherwise.peak)} GiB beside the model's state",
        "  not counted: communication buffers, allocator waste, the device's own context",
    ]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.2f}" if num_bytes else "-"
