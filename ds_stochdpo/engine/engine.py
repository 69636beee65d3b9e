"""The training engine: one optimizer step, evaluation and scoring on DeepSpeed. Entry: `StochDPOEngine`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.data.pair import PreferencePair
from ds_stochdpo.engine.checkpoint import load_checkpoint, save_checkpoint
from ds_stochdpo.engine.distributed import Ranks, peak_memory_gib
from ds_stochdpo.engine.export import export_model
from ds_stochdpo.engine.finite import FiniteGuard
from ds_stochdpo.engine.frozen import FrozenReference
from ds_stochdpo.engine.lockstep import check_reference, draw_over_ranks, plan_micro_batches, train_limits
from ds_stochdpo.engine.norm import GradientNorm
from ds_stochdpo.engine.settings import zero_stage
from ds_stochdpo.engine.step import PAIR_MEANS, TOKEN_SUMS, PairScores, micro_step, unpack_scores
from ds_stochdpo.engine.watch import NoWatch, Watch
from ds_stochdpo.errors import ConfigError, Interrupted, NonFiniteError
from ds_stochdpo.model import TwoLaneModel
from ds_stochdpo.packing import (
    BatchLimits,
    LaneLayout,
    draw,
    pack_lanes,
)
from ds_stochdpo.pruning import ModelShape, PairDraw, full_draw

Metrics = dict[str, float]


class StochDPOEngine:
    """A policy under training. Every method but `draw` and the properties is collective.

    Attributes:
        config: Settings with nothing left open.
        ds_config: What DeepSpeed got.
        ranks: This process among the others.
        attention: Name of the attention backend.
        module: The two-lane model.
        deepspeed: The DeepSpeed engine.
        epoch: Epoch whose draws are made when `train_step` gets none.
        reference: Frozen reference model, if there is one beside the policy.
        watch: Is told of progress, and says when this rank wants to stop.
        stop_agreed: Number of the signal on which all ranks stop after the last step; 0: none.
    """

    def __init__(
        self,
        ds_engine: Any,
        module: TwoLaneModel,
        config: StochDPOConfig,
        ds_config: dict[str, Any],
        ranks: Ranks,
        attention: str,
    ) -> None:
        self.deepspeed = ds_engine
        self.module = module
        self.config = config
        self.ds_config = ds_config
        self.ranks = ranks
        self.attention = attention
        self.epoch = 0
        self.reference: FrozenReference | None = None
        self.watch: Watch = NoWatch()
        self.stop_agreed = 0
        self._is_initial_policy = True
        self._finite = FiniteGuard(ranks, skips=config.non_finite == "skip", limit=config.non_finite_limit)
        self._norm = GradientNorm(ds_engine, stage=zero_stage(ds_config), max_norm=config.max_grad_norm)

    @property
    def shape(self) -> ModelShape:
        """Sizes of the model that the cost of a pair depends on."""
        return self.module.family.shape(self.module.lm.config)

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return int(self.deepspeed.global_steps)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return float(self.deepspeed.optimizer.param_groups[0]["lr"])

    @property
    def is_initial_policy(self) -> bool:
        """Whether the weights are still those the engine was given."""
        return self._is_initial_policy

    def draw(self, pairs: Sequence[PreferencePair]) -> list[PairDraw]:
        """Draws of the pairs of all ranks in one optimizer step, at the engine's step and epoch. Not collective.

        Args:
            pairs: The global pairs of the step.

        Returns:
            One draw for each pair; a pure function of seed, epoch, step, ids and lengths.
        """
        return draw(pairs, self.config, epoch=self.epoch, step=self.step)

    def train_step(self, pairs: Sequence[PreferencePair], draws: Sequence[PairDraw] | None = None) -> Metrics:
        """One optimizer step.

        Args:
            pairs: This rank's pairs; ranks may have different numbers, also none.
            draws: One draw for each pair. None: drawn over the pairs of all ranks.

        Returns:
            Metrics over all ranks, equal on every rank: the names of `PAIR_MEANS` (means over pairs, estimates from
            what was sampled), `TOKEN_SUMS`, tokens/full (what padding-free DPO would run), grad_norm (before
            clipping), learning_rate, time/step_s and memory/peak_gib (largest over ranks), and
            for models with experts router/aux_loss, which is no part of the loss.

        Raises:
            ConfigError: If pairs lack the reference log-probs that the settings ask for.
            LockstepError: If the ranks are at different steps or have different settings.
            NonFiniteError: If loss or gradient are not finite and `non_finite` is stop, or too often in a row. The
                weights are then those before the step, and the engine takes no further one.
        """
        started, step = time.perf_counter(), self.step + 1
        self._finite.require_running()
        check_reference(pairs, self.config)
        if draws is None:
            draws = draw_over_ranks(self.ranks, pairs, self.config, epoch=self.epoch, step=self.step)
        micro_batches, num_pairs_global = self._plan(pairs, draws, train_limits(self.config))
        # DeepSpeed averages gradients over ranks; the surrogate is already divided by the pairs of all of them.
        undo_average = self.ranks.world_size
        sums = self._zero_sums()
        for indices in micro_batches:
            self.watch.beat()
            micro_pairs, micro_draws = [pairs[i] for i in indices], [draws[i] for i in indices]
            layout = self._with_reference(self._pack(micro_pairs, micro_draws))
            live, frozen = self.deepspeed(layout)
            outcome = micro_step(layout, micro_draws, live, frozen, self.config, num_pairs_global=num_pairs_global)
            factor = self._finite.factor(outcome.sums, micro_pairs)
            self.deepspeed.backward(outcome.surrogate * factor * undo_average)
            sums += outcome.sums
        full = sum(2 * len(p.prompt_ids) + len(p.chosen_ids) + len(p.rejected_ids) for p in pairs)
        metrics = self._reduce(sums, full, num_pairs_global)
        metrics |= self.module.routing_metrics(self.ranks.sum, self.ranks.device)
        metrics["learning_rate"] = self.learning_rate
        self._is_initial_policy = False
        self.deepspeed.step()
        metrics["grad_norm"] = self._norm.last()
        metrics["steps/skipped"] = float(self.deepspeed.skipped_steps)
        self._finite.judge(step, metrics["loss"], was_dropped=self._norm.was_dropped)
        worst = torch.tensor([time.perf_counter() - started, peak_memory_gib(), self.watch.wanted], dtype=torch.float64)
        worst = self.ranks.max(worst.to(self.ranks.device))
        metrics["time/step_s"], metrics["memory/peak_gib"], stop = worst.tolist()
        self.stop_agreed = int(stop)
        self.watch.rest()
        return metrics

    def evaluate(self, pairs: Sequence[PreferencePair], progress: Callable[[int], None] | None = None) -> Metrics:
        """Loss and rewards with every keep rate 1 and no gradient.

        Args:
            pairs: This rank's pairs.
            progress: Told the number of pairs finished after each micro-batch.

        Returns:
            The names of `PAIR_MEANS` over the pairs of all ranks; exact, they depend neither on batch size, packing,
            order nor world size beyond rounding (1e-5 relative in fp32).

        Raises:
            ConfigError: If pairs lack the reference log-probs that the settings ask for.
            NonFiniteError: If the loss is not finite.
            Interrupted: If a rank wants to stop.
        """
        check_reference(pairs, self.config)
        draws = [full_draw(len(p.chosen_ids), len(p.rejected_ids)) for p in pairs]
        sums = self._zero_sums()
        num_pairs_global = 0
        for indices, bare_layout, live, frozen, num_pairs_global in self._forward_all(pairs, draws, self.deepspeed):
            layout = self._with_reference(bare_layout)
            outcome = micro_step(
                layout, [draws[i] for i in indices], live, frozen, self.config, num_pairs_global=num_pairs_global
            )
            sums += outcome.sums
            if progress:
                progress(len(indices))
        metrics = {k: v for k, v in self._reduce(sums, 0, num_pairs_global).items() if k in PAIR_MEANS}
        if not _is_finite(metrics):
            raise NonFiniteError(f"evaluation after optimizer step {self.step}: loss is {metrics['loss']}; stopping.")
        return metrics

    def score(
        self,
        pairs: Sequence[PreferencePair],
        progress: Callable[[int], None] | None = None,
        *,
        of_reference: bool = False,
    ) -> list[PairScores]:
        """Per-token log-probs of both responses under the current policy, with the prompt run once.

        Args:
            pairs: This rank's pairs.
            progress: Told the number of pairs finished after each micro-batch.
            of_reference: Score with the frozen reference model instead.

        Returns:
            One record for each pair, in order.

        Raises:
            ConfigError: If there is no reference model to score with.
        """
        if of_reference and self.reference is None:
            raise ConfigError("there is no reference model beside the policy; pass ref_model to initialize.")
        model = self.reference if of_reference else self.deepspeed
        draws = [full_draw(len(p.chosen_ids), len(p.rejected_ids)) for p in pairs]
        scores = [
            PairScores(np.zeros(len(p.chosen_ids), np.float32), np.zeros(len(p.rejected_ids), np.float32))
            for p in pairs
        ]
        for indices, layout, live, frozen, _ in self._forward_all(pairs, draws, model):
            unpack_scores(layout, torch.cat([live, frozen]), [scores[i] for i in indices])
            if progress:
                progress(len(indices))
        return scores

    def export(self, output_dir: str | Path, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Write the policy, and the tokenizer if given, in Hugging Face form, and read it back (`export_model`)."""
        # A forward without backward leaves prefetched gathers under way, which DeepSpeed 0.19.8 refuses to partition.
        self.deepspeed.empty_partition_cache()
        export_model(self.module.lm, Path(output_dir), self.ranks, tokenizer, max_shard_size=self.config.max_shard_size)

    def save_checkpoint(self, folder: str | Path) -> None:
        """Write a complete checkpoint as `folder`, or nothing (`checkpoint.save_checkpoint`)."""
        save_checkpoint(self, Path(folder))

    def load_checkpoint(self, folder: str | Path) -> None:
        """Continue from what `save_checkpoint` wrote, also on other ranks (`checkpoint.load_checkpoint`)."""
        load_checkpoint(self, Path(folder))

    def mark_trained(self) -> None:
        """Say that the weights are no longer those the engine was given, so that they cannot serve as reference."""
        self._is_initial_policy = False

    def _pack(self, pairs: Sequence[PreferencePair], draws: Sequence[PairDraw]) -> LaneLayout:
        self.module.check_lengths(pairs)
        if self.reference is not None:
            self.reference.module.check_lengths(pairs)
        layout = pack_lanes(
            pairs,
            draws,
            share_prompt=self.config.share_prompt,
            share_response_start=self.config.share_response_start,
        )
        return layout.to(self.ranks.device)

    def _with_reference(self, layout: LaneLayout) -> LaneLayout:
        """Under `reference: online` the reference scores the rows that were drawn, and no others."""
        if self.config.reference != "online":
            return layout
        assert self.reference is not None
        return self.reference.attach(layout)

    def _plan(
        self, pairs: Sequence[PreferencePair], draws: Sequence[PairDraw], limits: BatchLimits
    ) -> tuple[list[list[int]], int]:
        return plan_micro_batches(self.ranks, pairs, draws, limits, self.config, step=self.step, epoch=self.epoch)

    def _forward_all(
        self, pairs: Sequence[PreferencePair], draws: Sequence[PairDraw], model: Any
    ) -> Iterator[tuple[list[int], LaneLayout, Tensor, Tensor, int]]:
        """Run every pair through `model` without gradient, in lock-step micro-batches."""
        limits = BatchLimits(self.config.per_device_eval_batch_size, self.config.max_tokens_per_micro_batch)
        micro_batches, num_pairs_global = self._plan(pairs, draws, limits)
        with torch.no_grad(), self._evaluating():
            for indices in micro_batches:
                self.watch.beat()
                layout = self._pack([pairs[i] for i in indices], [draws[i] for i in indices])
                live, frozen = model(layout)
                yield indices, layout, live, frozen, num_pairs_global
                self._stop_if_wanted()
        self.watch.rest()

    def _stop_if_wanted(self) -> None:
        wanted = torch.tensor([self.watch.wanted], device=self.ranks.device)
        # Every rank, after each of its micro-batches, whose number is the same on all.
        if signum := int(self.ranks.max(wanted)):
            raise Interrupted(signum)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self.deepspeed.eval()
        try:
            yield
        finally:
            self.deepspeed.train()

    def _zero_sums(self) -> Tensor:
        return torch.zeros(len(PAIR_MEANS) + len(TOKEN_SUMS), dtype=torch.float64, device=self.ranks.device)

    def _reduce(self, sums: Tensor, full_tokens: int, num_pairs_global: int) -> Metrics:
        total = self.ranks.sum(torch.cat([sums, sums.new_tensor([full_tokens])])).tolist()
        means = {name: value / num_pairs_global for name, value in zip(PAIR_MEANS, total, strict=False)}
        return means | dict(zip((*TOKEN_SUMS, "tokens/full"), total[len(PAIR_MEANS) :], strict=True))


def _is_finite(metrics: Metrics) -> bool:
    return all(math.isfinite(metrics[name]) for name in PAIR_MEANS)
