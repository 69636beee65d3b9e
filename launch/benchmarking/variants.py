"""The ways to compute one DPO step that are compared, by name, and the step itself. Entry: `variant_of`, `Bench`."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarking.workload import build_model
from ds_stochdpo.config import PruningPlan, StochDPOConfig
from ds_stochdpo.data import PreferencePair
from ds_stochdpo.engine.step import MicroStep, micro_step
from ds_stochdpo.errors import ConfigError
from ds_stochdpo.model import ScoringOptions, TwoLaneModel, choose_backend, chunked_logps, family_of
from ds_stochdpo.packing import BatchLimits, cut_micro_batches, lane_tokens, pack_lanes
from ds_stochdpo.pruning import PairDraw, draw_pairs
from ds_stochdpo.pruning.work import Variant

BASES = {
    "stock": "stock DPO: padded, concatenated, full logits",
    "chunked": "stock, head in chunks on response rows only",
    "packed": "packed without padding, prompt run twice",
    "packed_single": "packed, prompt run twice, single branch",
    "exact": "exact: packed, prompt shared",
    "single": "exact + single branch",
    "prefix": "exact + prefix pruning",
    "position": "exact + position pruning",
    "single_prefix": "exact + single branch + prefix",
    "all": "all three prunings",
    "smaller": "exact on fewer pairs, time of `all`",
}
"""What a name means; the suffixes of `SUFFIXES` may follow it."""
SUFFIXES = {
    "+ckpt": ", activation checkpointing",
    "+online": ", online reference",
    "+budget": ", token budget per micro-batch",
}


FORMS = ("padded", "lanes")
"""The model as transformers has it, and its two-lane form."""


@dataclass(frozen=True)
class BenchVariant:
    """A way to compute a step.

    Attributes:
        name: Base name and suffixes, such as `exact+ckpt`.
        work: What the cost model needs to know of it.
        max_tokens: Token budget of a micro-batch; None: the whole batch at once.
        num_pairs: Pairs of its batch.
    """

    name: str
    work: Variant
    num_pairs: int
    max_tokens: int | None = None

    @property
    def title(self) -> str:
        """For people."""
        base, *suffixes = self.name.split("+")
        return BASES[base] + "".join(SUFFIXES[f"+{s}"] for s in suffixes)

    @property
    def form(self) -> str:
        """Which of `FORMS` it runs."""
        return "padded" if self.work.layout == "padded" else "lanes"

    @property
    def is_sampled(self) -> bool:
        """Whether the work of a step depends on what is drawn: the kept response of a pair may be the longer one."""
        plan = self.work.plan
        return plan.prefix_keep < 1 or plan.position_keep < 1 or plan.branch == "single"


def variant_of(name: str, config: StochDPOConfig, num_pairs: int) -> BenchVariant:
    """A variant by its name.

    Args:
        name: A key of `BASES`, with suffixes.
        config: Its pruning is what the pruned variants take their parts from; its `score_recompute` is that of all.
        num_pairs: Pairs of the batch.

    Raises:
        ConfigError: If the name is unknown.
    """
    base, *suffixes = name.split("+")
    unknown = [s for s in suffixes if f"+{s}" not in SUFFIXES]
    if base not in BASES or unknown:
        raise ConfigError(f"variant {name!r} is unknown; allowed: {', '.join(BASES)}, with {', '.join(SUFFIXES)}.")
    plan, off = config.pruning, PruningPlan()
    takes = {
        "branch": base in ("packed_single", "single", "single_prefix", "all"),
        "prefix": base in ("prefix", "single_prefix", "all"),
        "position": base in ("position", "all"),
    }
    chosen = {
        f.name: getattr(plan if takes.get(f.name.split("_")[0], False) else off, f.name)
        for f in dataclasses.fields(PruningPlan)
    }
    layout = {"stock": "padded", "chunked": "padded", "packed": "packed", "packed_single": "packed"}.get(base, "shared")
    work = Variant(
        name=name,
        layout=layout,  # type: ignore[arg-type]
        head="full" if base == "stock" else "responses",
        plan=PruningPlan(**chosen),
        gradient_checkpointing="ckpt" in suffixes,
        score_recompute=config.score_recompute,
        reference="online" if "online" in suffixes else "cached",
        share_response_start=layout == "shared",
    )
    return BenchVariant(name, work, num_pairs)


class Bench:
    """One model in both forms, with the same weights: as transformers has it, and in two lanes.

    Attributes:
        device: Where it runs.
        attention: Name of the attention backend of the two-lane form.
    """

    def __init__(self, config: StochDPOConfig, num_layers: int, forms: Collection[str] = FORMS) -> None:
        """Load the model and make an optimizer for each form.

        Args:
            config: Model, beta, score_chunk_rows, score_recompute, attention backend, seed.
            num_layers: As in `build_model`.
            forms: Those that will be run.
        """
        self.config = config
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.scoring = ScoringOptions(config.score_chunk_rows, config.score_recompute)
        self._modules: dict[str, Any] = {form: build_model(config, num_layers, self.device) for form in forms}
        self.attention = "none"
        if "lanes" in forms:
            model = self._modules["lanes"]
            dtype = next(model.parameters()).dtype
            caps_attention = family_of(model).caps_attention(model.config)
            self.attention, backend = choose_backend(
                config.attn_implementation, self.device, dtype, caps_attention=caps_attention
            )
            self._modules["lanes"] = TwoLaneModel(model, backend, self.scoring)
        # A rate of 0: every step does all its work and leaves the same weights for the next variant.
        self._optimizers = {
            form: torch.optim.AdamW(module.parameters(), lr=0.0, weight_decay=0.0, fused=True)
            for form, module in self._modules.items()
        }

    def module(self, variant: BenchVariant) -> torch.nn.Module:
        """What a variant runs."""
        return self._modules[variant.form]

    def step(self, variant: BenchVariant, pairs: Sequence[PreferencePair], turn: int) -> MicroStep | Tensor:
        """One whole optimizer step: draws, packing, forward, backward, metrics, AdamW.

        Args:
            variant: How.
            pairs: Pairs of the step.
            turn: Decides the draws, the same for every variant.

        Returns:
            The loss of the padded forms, or the last micro-batch's outcome of the packed ones.
        """
        if variant.work.layout == "padded":
            outcome: MicroStep | Tensor = self._padded_step(variant, pairs)
        else:
            outcome = self._packed_step(variant, pairs, turn)
        optimizer = self._optimizers[variant.form]
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return outcome

    def draws(self, variant: BenchVariant, pairs: Sequence[PreferencePair], turn: int) -> list[PairDraw]:
        """The draws of one turn."""
        return draw_pairs(
            variant.work.plan,
            seed=self.config.seed,
            epoch=turn,
            step=turn,
            pair_ids=[p.pair_id for p in pairs],
            chosen_lengths=[len(p.chosen_ids) for p in pairs],
            rejected_lengths=[len(p.rejected_ids) for p in pairs],
        )

    def _packed_step(self, variant: BenchVariant, pairs: Sequence[PreferencePair], turn: int) -> MicroStep:
        model = self._modules["lanes"]
        shares = variant.work.layout == "shared"
        sharing = {"share_prompt": shares, "share_response_start": shares}
        draws = self.draws(variant, pairs, turn)
        tokens = [lane_tokens(p, d, **sharing).total for p, d in zip(pairs, draws, strict=True)]
        for indices in cut_micro_batches(tokens, BatchLimits(len(pairs), variant.max_tokens)):
            own = [draws[i] for i in indices]
            layout = pack_lanes([pairs[i] for i in indices], own, **sharing).to(self.device)
            if variant.work.reference == "online":
                with torch.no_grad():
                    model(layout)
            model.lane_state.checkpoints_live = variant.work.gradient_checkpointing
            live, frozen = model(layout)
            outcome = micro_step(layout, own, live, frozen, self.config, num_pairs_global=len(pairs))
            outcome.surrogate.backward()
            # What the trainer does once a step for its log.
            outcome.sums.tolist()
        return outcome

    def _padded_step(self, variant: BenchVariant, pairs: Sequence[PreferencePair]) -> Tensor:
        stock = self._modules["padded"]
        if variant.work.gradient_checkpointing:
            stock.activation_checkpointing_enable()
        batch = PaddedBatch(pairs, self.device)
        logps = self._full_logps if variant.work.head == "full" else self._chunked_logps
        if variant.work.reference == "online":
            with torch.no_grad():
                logps(batch)
        chosen, rejected = logps(batch).chunk(2)
        loss = -F.logsigmoid(self.config.beta * (chosen - rejected)).mean()
        loss.backward()
        stock.activation_checkpointing_disable()
        torch.stack([loss.detach(), chosen.detach().sum(), rejected.detach().sum()]).tolist()
        return loss.detach()

    def _full_logps(self, batch: PaddedBatch) -> Tensor:
        logits = (
            self._modules["padded"](input_ids=batch.ids, attention_mask=batch.attends, use_cache=False)
            .logits[:, :-1]
            .float()
        )
        logps = logits.log_softmax(-1).gather(-1, batch.ids[:, 1:, None]).squeeze(-1)
        return (logps * batch.is_response[:, 1:]).sum(-1)

    def _chunked_logps(self, batch: PaddedBatch) -> Tensor:
        stock = self._modules["padded"]
        hidden = stock.base_model(input_ids=batch.ids, attention_mask=batch.attends, use_cache=False).last_hidden_state
        row, place = batch.is_response[:, 1:].nonzero(as_tuple=True)
        weight = stock.get_output_embeddings().weight
        logps_K = chunked_logps(hidden[row, place], weight, batch.ids[row, place + 1], self.scoring)
        return logps_K.new_zeros(len(batch.ids)).index_add(0, row, logps_K)


class PaddedBatch:
    """Chosen rows above rejected rows, padded to the longest of all, as TRL's collator does.

    Attributes:
        ids: [2 x pairs, longest] token ids.
        attends: 1 where there is a token.
        is_response: Whether a token belongs to the response.
    """

    def __init__(self, pairs: Sequence[PreferencePair], device: torch.device) -> None:
        responses = [p.chosen_ids for p in pairs] + [p.rejected_ids for p in pairs]
        prompts = [p.prompt_ids for p in pairs] * 2
        rows = [torch.from_numpy(np.concatenate(parts)) for parts in zip(prompts, responses, strict=True)]
        self.ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
        lengths = torch.tensor([len(r) for r in rows], device=device)[:, None]
        starts = torch.tensor([len(p) for p in prompts], device=device)[:, None]
        place = torch.arange(self.ids.shape[1], device=device)
        self.attends = (place < lengths).long()
        self.is_response = (place < lengths) & (place >= starts)
