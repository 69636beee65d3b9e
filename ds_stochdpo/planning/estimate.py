"""Work, time, memory and communication of several plans side by side, before any machine is rented.

Entry: `estimate`; `estimate_page.py` prints what it returns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ds_stochdpo.errors import ConfigError
from ds_stochdpo.model import StepMemory
from ds_stochdpo.planning.forecast import variant_of
from ds_stochdpo.planning.outlook import Outlook
from ds_stochdpo.pruning import StepWork, Variant, ladder
from ds_stochdpo.pruning.memory import Held
from ds_stochdpo.pruning.traffic import Cluster, Traffic, step_traffic

OWN = "these settings"
"""Name of the plan that the settings themselves are."""
FULL_RATE = 0.5
"""Keep rate of a cut that is shown though the settings leave it off."""


@dataclass(frozen=True)
class Scale:
    """One plan on some machines, each rank with the same share of an optimizer step.

    Attributes:
        nodes: Machines.
        ranks: GPUs on all of them.
        compute_s: Matrix products of the busiest rank in one optimizer step.
        communication_s: Collectives of one optimizer step.
        peak: The most that one rank holds.
    """

    nodes: int
    ranks: int
    compute_s: float
    communication_s: float
    peak: Held

    @property
    def hidden_s(self) -> float:
        """Time of a step whose communication runs wholly beside its compute."""
        return max(self.compute_s, self.communication_s)

    @property
    def exposed_s(self) -> float:
        """Time of a step whose communication waits for its compute."""
        return self.compute_s + self.communication_s


@dataclass(frozen=True)
class PlanEstimate:
    """What one plan costs.

    Attributes:
        variant: The plan.
        work: A pair, mean over draws.
        imbalance: Work of the busiest rank over the mean of the ranks.
        micro_batches: Of one rank in one optimizer step, at most.
        memory: Of the largest micro-batch, beyond the model's state.
        held: Bytes of one rank by kind.
        peak: The most that one rank holds.
        traffic: Of one optimizer step.
        scales: Other numbers of machines.
    """

    variant: Variant
    work: StepWork
    imbalance: float
    micro_batches: int
    memory: StepMemory
    held: dict[str, Held]
    peak: Held
    traffic: Traffic
    scales: tuple[Scale, ...]


@dataclass(frozen=True)
class Estimate:
    """All plans, and what they were computed for.

    Attributes:
        outlook: The run.
        cluster: Rates.
        pairs_per_rank: Pairs of one rank in one optimizer step.
        plans: In the order asked for.
    """

    outlook: Outlook
    cluster: Cluster
    pairs_per_rank: int
    plans: tuple[PlanEstimate, ...]

    def ratio(self, plan: PlanEstimate, name: str) -> float | None:
        """Work of the plan called `name` over that of `plan`; None if it was not asked for."""
        others = [p for p in self.plans if p.variant.name == name]
        return others[0].work.total / plan.work.total if others else None

    def record(self) -> dict[str, Any]:
        """Everything as plain JSON values; bytes, seconds, and single floating-point operations."""
        outlook = self.outlook
        return {
            "model": {
                "name": outlook.config.model_name_or_path,
                "source": outlook.outline.source,
                "num_weights": outlook.outline.num_weights,
                "shape": dataclasses.asdict(outlook.shape),
            },
            "pairs": outlook.told,
            "state": dataclasses.asdict(outlook.state),
            "attention_kernel": outlook.kernel,
            "cluster": dataclasses.asdict(self.cluster),
            "pairs_per_rank": self.pairs_per_rank,
            "settings": outlook.config.to_dict(),
            "plans": [self._plan_record(plan) for plan in self.plans],
        }

    def _plan_record(self, plan: PlanEstimate) -> dict[str, Any]:
        totals = {"layers": plan.work.layers, "head": plan.work.head, "total": plan.work.total}
        return {
            **dataclasses.asdict(plan),
            "work": {**dataclasses.asdict(plan.work), **totals},
            "times_faster_than_stock": self.ratio(plan, "stock"),
            "times_faster_than_exact": self.ratio(plan, "exact"),
            "scales": [
                {**dataclasses.asdict(s), "hidden_s": s.hidden_s, "exposed_s": s.exposed_s} for s in plan.scales
            ],
        }


def plans_for(outlook: Outlook, names: Sequence[str] | None = None) -> list[Variant]:
    """The usual plans with the rates, checkpointing and reference of a run, and the run's own plan as the last.

    Args:
        outlook: The run.
        names: Which of them; None: all.

    Raises:
        ConfigError: If a name is none of them.
    """
    config = outlook.config
    plan = config.pruning
    usual = ladder(
        gradient_checkpointing=config.gradient_checkpointing,
        reference=config.reference,
        position_keep=plan.position_keep if plan.position_keep < 1.0 else FULL_RATE,
        prefix_keep=plan.prefix_keep if plan.prefix_keep < 1.0 else FULL_RATE,
    )
    plans = {v.name: dataclasses.replace(v, score_recompute=config.score_recompute) for v in usual}
    plans[OWN] = variant_of(config, OWN)
    unknown = [name for name in names or () if name not in plans]
    if unknown:
        raise ConfigError(f"plans names {unknown[0]!r}; known: {', '.join(plans)}.")
    return [plans[name] for name in names or plans]


def estimate(
    outlook: Outlook,
    variants: Sequence[Variant],
    cluster: Cluster,
    *,
    nodes: Sequence[int],
    told: Callable[[str], None] = lambda _: None,
) -> Estimate:
    """Cost of some plans.

    Args:
        outlook: The run.
        variants: The plans.
        cluster: Rates of the machines.
        nodes: Numbers of machines to show; each rank keeps its share of a step, so a step grows with them.
        told: Called with the name of each plan as its turn comes.

    Returns:
        The plans' costs, in the order given.
    """
    config = outlook.config
    assert config.per_device_train_batch_size is not None
    assert config.gradient_accumulation_steps is not None
    pairs_per_rank = config.per_device_train_batch_size * config.gradient_accumulation_steps
    plans = []
    for variant in variants:
        told(variant.name)
        plans.append(_plan(outlook, variant, cluster, nodes, pairs_per_rank))
    return Estimate(outlook, cluster, pairs_per_rank, tuple(plans))


def _plan(
    outlook: Outlook, variant: Variant, cluster: Cluster, nodes: Sequence[int], pairs_per_rank: int
) -> PlanEstimate:
    counts = outlook.forecast(variant)
    memory = outlook.micro_batch_memory(counts.largest, variant)
    is_online = variant.reference == "online"

    def traffic(ranks: int) -> Traffic:
        return step_traffic(
            outlook.outline.num_weights,
            dataclasses.replace(outlook.state, world_size=ranks),
            micro_batches=counts.micro_batches,
            online_reference=is_online,
        )

    compute_s = cluster.compute_s(counts.work.total * pairs_per_rank * counts.imbalance)

    def scale(num_nodes: int) -> Scale:
        ranks = num_nodes * cluster.gpus_per_node
        communication_s = cluster.communication_s(traffic(ranks), ranks)
        return Scale(num_nodes, ranks, compute_s, communication_s, outlook.peak(memory, world_size=ranks))

    return PlanEstimate(
        variant,
        counts.work,
        counts.imbalance,
        counts.micro_batches,
        memory,
        outlook.held(memory),
        outlook.peak(memory),
        traffic(outlook.state.world_size),
        tuple(scale(num_nodes) for num_nodes in nodes),
    )
