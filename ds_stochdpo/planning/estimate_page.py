"""An estimate as text for a reader. Entry: `estimate_page`."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from ds_stochdpo.planning.estimate import OWN, Estimate, Scale

GIB = 2**30
TERA = 1e12
GIGA = 1e9
NAME_WIDTH = 24
CELL_WIDTH = 10


def estimate_page(result: Estimate) -> str:
    """Tables of work, memory, communication and scaling, each with its units and what it leaves out.

    Args:
        result: From `estimate`.

    Returns:
        Lines of text, at most 120 wide where names are short.
    """
    parts = [_head(result), _work(result), _memory(result), _traffic(result)]
    if result.plans[0].scales:
        parts.append(_scaling(result))
    return "\n\n".join("\n".join(lines) for lines in parts)


def _head(result: Estimate) -> list[str]:
    outlook = result.outlook
    config, state = outlook.config, outlook.state
    name = config.model_name_or_path or outlook.outline.source
    source = "" if outlook.outline.source == name else f" (sizes from {outlook.outline.source})"
    return [
        f"model      {name}{source}: {outlook.outline.num_weights:,} weights, {'bf16' if config.bf16 else 'fp32'}",
        f"pairs      {outlook.told}",
        f"ranks      {state.world_size}, ZeRO stage {state.zero_stage}; {result.pairs_per_rank} pairs a rank and step, "
        f"gradient_checkpointing {str(config.gradient_checkpointing).lower()}, reference {config.reference}",
        f"attention  {'fused causal kernel (flash)' if outlook.kernel == 'flash' else 'CPU kernel, with masks'} in "
        "memory; causal in work",
    ]


def _table(title: str, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    cells = [len(cell) for _, row in rows for cell in row]
    width = max(CELL_WIDTH, 2 + max([*cells, *map(len, columns)]))
    lines = [title, " " * NAME_WIDTH + "".join(f"{column:>{width}}" for column in columns)]
    for name, row in rows:
        lines.append(f"  {name:<{NAME_WIDTH - 2}}" + "".join(f"{cell:>{width}}" for cell in row))
    return lines


def _work(result: Estimate) -> list[str]:
    rows = []
    for plan in result.plans:
        work = plan.work
        ratios = [result.ratio(plan, name) for name in ("stock", "exact")]
        rows.append(
            (
                plan.variant.name,
                [
                    f"{work.tokens_executed:,.0f}",
                    f"{work.tokens_backward:,.0f}",
                    f"{work.tokens_scored:,.0f}",
                    _number(work.layers / TERA),
                    _number(work.head / TERA),
                    _number(work.reference / TERA),
                    _number(work.total / TERA),
                    *("-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios),
                ],
            )
        )
    columns = ("tokens", "w. grad", "to head", "layers", "head", "ref.", "total", "vs stock", "vs exact")
    return [
        *_table("Work of one pair, mean over draws, in TFLOP (10^12 operations)", columns, rows),
        "  vs stock, vs exact: how many times faster if matrix products decide. stock: padded to the longest of a",
        "  micro-batch, logits of every row. packed: no padding, response rows only. exact: the prompt shared as well.",
        *_rates_note(result),
    ]


def _rates_note(result: Estimate) -> list[str]:
    """The keep rates behind the names of the plans."""
    pruned = {
        key: getattr(plan.variant.plan, key)
        for plan in result.plans
        for key in ("prefix_keep", "position_keep")
        if plan.variant.name != OWN and getattr(plan.variant.plan, key) < 1
    }
    return ["  Cuts of the plans: " + ", ".join(f"{key} {rate:g}" for key, rate in pruned.items())] if pruned else []


def _memory(result: Estimate) -> list[str]:
    rows = []
    for plan in result.plans:
        memory = plan.memory
        resting = sum(h.device for h in plan.held.values() if not h.in_step) - memory.peak
        cells = [_gib(resting), _gib(memory.kept), _gib(memory.head), _gib(memory.layers), _gib(plan.peak.device)]
        rows.append((plan.variant.name, [*cells, _gib(plan.peak.host)]))
    columns = ("model state", "kept", "+ head", "or + layer", "peak", "on host")
    held = result.plans[0].held
    state = "; ".join(f"{name} {_gib(h.device or h.host)}" for name, h in list(held.items())[:-2] if h.device or h.host)
    return [
        *_table("Peak memory of one rank, in GiB (2^30 bytes), at its largest micro-batch", columns, rows),
        *textwrap.wrap(f"model state: {state}.", 112, initial_indent="  ", subsequent_indent="  "),
        "  kept: activations for the backward pass. head: logits and the gradient of the head's matrix while it runs.",
        "  layer: the working set of one layer. Left out: communication buffers, allocator waste, the device's own.",
    ]


def _traffic(result: Estimate) -> list[str]:
    rows = [
        (
            plan.variant.name,
            [
                str(plan.micro_batches),
                _number(plan.traffic.all_gather / GIGA),
                _number((plan.traffic.reduce_scatter + plan.traffic.all_reduce) / GIGA),
                _number(plan.traffic.passage / GIGA / plan.micro_batches),
                f"{plan.imbalance:.3f}",
            ],
        )
        for plan in result.plans
    ]
    columns = ("micro-batches", "all-gather", "reduce", "a micro-batch", "imbalance")
    title = "Communication of one rank in one optimizer step, in GB (10^9 bytes) of whole tensors"
    return [
        *_table(title, columns, rows),
        "  The same for every plan at equal micro-batches: what was drawn changes no collective.",
        *_budget_note(result),
        "  imbalance: work of the busiest rank over the mean of the ranks.",
    ]


def _budget_note(result: Estimate) -> list[str]:
    budget = result.outlook.config.max_tokens_per_micro_batch
    return [f"  Padded plans take their pairs at once; the others are cut at {budget:,} tokens."] if budget else []


def _scaling(result: Estimate) -> list[str]:
    cluster = result.cluster
    plans = result.plans
    per_step = result.pairs_per_rank

    def pairs_s(scale: Scale) -> str:
        pairs = scale.ranks * per_step
        return f"{_number(pairs / scale.exposed_s)}-{_number(pairs / scale.hidden_s)}"

    def efficiency(scale: Scale) -> str:
        return f"{scale.compute_s / scale.exposed_s:.2f}-{scale.compute_s / scale.hidden_s:.2f}"

    lines = [
        f"Scaling at {cluster.tflops:g} TFLOP/s a GPU, {cluster.gpus_per_node} GPUs a node, "
        f"{cluster.link_gbps:g} Gbit/s from a GPU to its node, {cluster.node_gbps:g} Gbit/s from a node",
        "  From: no communication hidden behind compute. To: all of it hidden. Each rank keeps its share of a step.",
        "",
    ]
    tables: list[tuple[str, Callable[[Scale], str]]] = [
        ("pairs a second", pairs_s),
        ("efficiency: compute time / step time", efficiency),
        ("peak GiB of one GPU", lambda scale: _gib(scale.peak.device)),
    ]
    for title, cell in tables:
        columns = [f"{s.nodes} x {cluster.gpus_per_node}" for s in plans[0].scales]
        lines += _table(title, columns, [(plan.variant.name, [cell(s) for s in plan.scales]) for plan in plans])
        lines.append("")
    return [*lines, "  Left out: optimizer step, data, start-up, latency, and work that is no matrix product."]


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.2f}" if num_bytes else "-"


def _number(value: float) -> str:
    """Three digits or more."""
    if value == 0:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value >= 100 else f"{value:#.3g}"
