"""Work of one batch under a plan, part by part, beside that of stock DPO (METHOD.md section 8).

Entry: `expected_step_work`; `step_work` for given draws; `ladder` for the plans that are usually compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ds_stochdpo.config import PruningPlan
from ds_stochdpo.pruning.branches import chosen_keep_probs
from ds_stochdpo.pruning.cost import (
    ATTENTION_BACKWARD,
    LINEAR_BACKWARD,
    AttentionCount,
    ModelShape,
    PairLanes,
    PairLengths,
    Run,
    attention_flops,
    drawn_tokens,
    head_flops,
    last_product_flops,
    linear_flops,
    pair_lanes,
)
from ds_stochdpo.pruning.draws import Kept, PairDraw, draw_response
from ds_stochdpo.pruning.positions import num_uniforms
from ds_stochdpo.pruning.rng import Purpose, uniform

Layout = Literal["padded", "packed", "shared"]
ENOUGH_POINTS, FEWEST_POINTS = 1024, 8
"""Points of the prefix law that stand for an expectation: over all pairs about, and for one pair at least."""
GOLDEN_RATIO = 0.6180339887498949


@dataclass(frozen=True)
class Variant:
    """A way to run a step.

    Attributes:
        name: For tables.
        layout: `padded` (stock DPO: chosen and rejected rows concatenated, all padded to the longest), `packed` (no
            padding, each response behind a prompt of its own) or `shared` (packed, the prompt run once).
        head: `full` (logits of every row that is run) or `responses` (rows of sampled positions only, in chunks).
        plan: What is sampled; a padded layout samples nothing.
        gradient_checkpointing: Layers with gradient are recomputed in the backward pass.
        score_recompute: The chunked head rebuilds its logits in the backward pass; of no meaning for a full head.
        reference: `cached` and `none` cost nothing; `online` runs the same rows through a second model.
        share_response_start: Tokens that both responses begin with count as prompt; of no meaning for `padded`.
    """

    name: str = ""
    layout: Layout = "shared"
    head: Literal["full", "responses"] = "responses"
    plan: PruningPlan = field(default_factory=PruningPlan)
    gradient_checkpointing: bool = False
    score_recompute: bool = True
    reference: Literal["cached", "online", "none"] = "cached"
    share_response_start: bool = True

    def __post_init__(self) -> None:
        """Refuse what no code here runs.

        Raises:
            ValueError: If a padded layout is to sample, or a packed one to make logits of every row.
        """
        if self.layout == "padded" and self.samples:
            raise ValueError(f"variant {self.name!r} is padded, and padded rows are run whole: leave its plan empty.")
        if self.layout != "padded" and self.head == "full":
            raise ValueError(f"variant {self.name!r} is {self.layout}, and packed rows meet a responses head only.")

    @property
    def samples(self) -> bool:
        """Whether a draw decides what is run."""
        plan = self.plan
        return plan.branch != "both" or plan.prefix_keep < 1.0 or plan.position_keep < 1.0


@dataclass(frozen=True)
class StepWork:
    """Floating-point operations and tokens of one batch; means where it is an expectation.

    Attributes:
        forward: Layers, forward, of both lanes.
        backward: Layers, backward, without recomputation of layers.
        recompute: Layers, run again under activation checkpointing.
        head_forward: Output head, forward.
        head_backward: Output head, backward, without recomputation.
        head_recompute: Logits that the chunked head rebuilds.
        reference: Forward pass of an online reference, its head included.
        tokens_executed: Tokens that the policy runs; padding counts.
        tokens_backward: Those of them with gradient.
        tokens_scored: Rows that meet the head.
    """

    forward: float = 0
    backward: float = 0
    recompute: float = 0
    head_forward: float = 0
    head_backward: float = 0
    head_recompute: float = 0
    reference: float = 0
    tokens_executed: float = 0
    tokens_backward: float = 0
    tokens_scored: float = 0

    @property
    def layers(self) -> float:
        """All passes of the policy's layers."""
        return self.forward + self.backward + self.recompute

    @property
    def head(self) -> float:
        """All passes of the policy's head."""
        return self.head_forward + self.head_backward + self.head_recompute

    @property
    def total(self) -> float:
        """Everything, the online reference included."""
        return self.layers + self.head + self.reference

    def scaled(self, factor: float) -> StepWork:
        """Each figure times `factor`."""
        return StepWork(**{f.name: getattr(self, f.name) * factor for f in dataclasses.fields(self)})

    def __add__(self, other: StepWork) -> StepWork:
        return StepWork(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)})


def ladder(
    *,
    gradient_checkpointing: bool = False,
    reference: Literal["cached", "online", "none"] = "cached",
    position_keep: float = 0.5,
    prefix_keep: float = 0.5,
) -> list[Variant]:
    """Plans that are usually compared: stock DPO, what is exact, each cut alone on top of that, and all of them.

    Args:
        gradient_checkpointing: For all of them alike.
        reference: For all of them alike.
        position_keep: Rate of the position cut (systematic).
        prefix_keep: Rate of the prefix cut (two_point, least survival 0.25).

    Returns:
        Variants with distinct names; the first is stock DPO, "exact" is the one that prunes nothing and shares.
    """
    cuts: dict[str, dict[str, Any]] = {
        "branch": {"branch": "single"},
        "prefix": {"prefix_keep": prefix_keep},
        "position": {"position_keep": position_keep},
    }
    everything = {key: value for cut in cuts.values() for key, value in cut.items()}
    variants = [
        Variant("stock", "padded", "full"),
        Variant("stock + response head", "padded"),
        Variant("packed", "packed"),
        Variant("packed + branch", "packed", plan=PruningPlan(branch="single")),
        Variant("exact"),
        *(Variant(f"exact + {name}", plan=PruningPlan(**cut)) for name, cut in cuts.items()),
        Variant("all cuts", plan=PruningPlan(**everything)),
    ]
    return [
        dataclasses.replace(variant, gradient_checkpointing=gradient_checkpointing, reference=reference)
        for variant in variants
    ]


def expected_step_work(
    shape: ModelShape,
    pairs: Sequence[PairLengths],
    variant: Variant,
    *,
    attention: AttentionCount = "rectangle",
    recomputes_all: bool = False,
) -> StepWork:
    """Mean work of one batch over its draws.

    Both branches are weighed by their probabilities and the prefix law is integrated by the midpoint rule, for both
    responses of a pair together, as they are drawn; only the positions are drawn, and of them only the last of a
    prefix matters. So the result is exact in expectation without prefix and position pruning, else within about 1 %.

    Args:
        shape: The model.
        pairs: The pairs of the batch.
        variant: How it is run.
        attention: See `step_work`.
        recomputes_all: See `step_work`.

    Returns:
        Means.
    """
    if variant.layout == "padded":
        return step_work(shape, pairs, [], variant, attention=attention, recomputes_all=recomputes_all)
    total = StepWork()
    for index, pair in enumerate(pairs):
        for weight, draw in _outcomes(variant.plan, pair, index, len(pairs)):
            work = step_work(shape, [pair], [draw], variant, attention=attention, recomputes_all=recomputes_all)
            total += work.scaled(weight)
    return total


def _outcomes(plan: PruningPlan, pair: PairLengths, index: int, num_pairs: int) -> Iterator[tuple[float, PairDraw]]:
    """Draws of one pair that stand for all of them, and their weights, which sum to 1."""
    is_whole = plan.prefix_keep >= 1.0 and plan.position_keep >= 1.0
    points = 1 if is_whole else max(FEWEST_POINTS, -(-ENOUGH_POINTS // num_pairs))
    lengths = (pair.chosen, pair.rejected)
    count = max(num_uniforms(plan.position_sampler, length, plan.position_keep) for length in lengths)
    # Each pair starts at another place between two points, so that errors at the jumps of a law cancel over pairs.
    shift = (0.5 + index * GOLDEN_RATIO) % 1.0
    kept: list[tuple[Kept, float]] = [("both", 1.0)]
    if plan.branch == "single":
        chosen_prob = float(chosen_keep_probs(plan.branch_prob, [pair.chosen], [pair.rejected])[0])
        kept = [("chosen", chosen_prob), ("rejected", 1.0 - chosen_prob)]
    for point in range(points):
        uniforms = uniform(0, Purpose.POSITIONS, point, index, count=count)
        chosen, rejected = (
            draw_response(plan, length, prefix_uniform=(point + shift) / points, position_uniforms=uniforms)
            for length in lengths
        )
        for branch, prob in kept:
            yield prob / points, PairDraw(chosen, rejected, branch, prob)


def step_work(
    shape: ModelShape,
    pairs: Sequence[PairLengths],
    draws: Sequence[PairDraw],
    variant: Variant,
    *,
    attention: AttentionCount = "rectangle",
    recomputes_all: bool = False,
) -> StepWork:
    """Work of one batch under given draws.

    Left out: the optimizer, and what `ModelShape` cannot say (sliding windows count as full attention, and so do
    capped scores, which are not fused and rebuilt once more).

    Args:
        shape: The model.
        pairs: The pairs of the batch; a padded layout pads all their rows to the longest.
        draws: One draw for each pair.
        variant: How the batch is run.
        attention: Which pairs of query and key count. `rectangle` is what `count_flops` counts for any kernel;
            `causal` is what flash kernels run.
        recomputes_all: Under activation checkpointing the last product of each layer is recomputed too, as ZeRO-3's
            own linear layer makes it; plain torch stops before.

    Returns:
        Operations and tokens.
    """
    if variant.layout == "padded":
        lanes = _padded(pairs, variant)
    else:
        lanes = [
            pair_lanes(
                drawn_tokens(pair, draw, share_response_start=variant.share_response_start),
                share_prompt=variant.layout == "shared",
            )
            for pair, draw in zip(pairs, draws, strict=True)
        ]
    total = StepWork()
    for lane in lanes:
        total += _lanes_work(shape, lane, variant, attention, recomputes_all)
    return total


def _padded(pairs: Sequence[PairLengths], variant: Variant) -> list[PairLanes]:
    longest = max(pair.prompt + max(pair.chosen, pair.rejected) for pair in pairs)
    runs = (Run(longest, longest),) * 2
    return [
        PairLanes(runs, (), 2 * longest if variant.head == "full" else pair.chosen + pair.rejected, 0) for pair in pairs
    ]


def _lanes_work(
    shape: ModelShape, lanes: PairLanes, variant: Variant, attention: AttentionCount, recomputes_all: bool
) -> StepWork:
    live_linear, frozen_linear = (linear_flops(shape, n) for n in (lanes.live_tokens, lanes.frozen_tokens))
    live_attention, frozen_attention = (
        sum(attention_flops(shape, run, attention) for run in runs) for runs in (lanes.live, lanes.frozen)
    )
    forward = live_linear + frozen_linear + live_attention + frozen_attention
    recompute = 0
    if variant.gradient_checkpointing:
        skipped = shape.ends_in_product and not recomputes_all
        recompute = live_linear + live_attention
        recompute -= last_product_flops(shape, lanes.live_tokens) if skipped else 0
    head_live, head_frozen = head_flops(shape, lanes.live_rows), head_flops(shape, lanes.frozen_rows)
    rebuilds = variant.head == "responses" and variant.score_recompute
    head_forward = head_live + head_frozen
    return StepWork(
        forward=forward,
        backward=LINEAR_BACKWARD * live_linear + ATTENTION_BACKWARD * live_attention,
        recompute=recompute,
        head_forward=head_forward,
        head_backward=LINEAR_BACKWARD * head_live,
        head_recompute=head_live if rebuilds else 0,
        reference=forward + head_forward if variant.reference == "online" else 0,
        tokens_executed=lanes.live_tokens + lanes.frozen_tokens,
        tokens_backward=lanes.live_tokens,
        tokens_scored=lanes.live_rows + lanes.frozen_rows,
    )
