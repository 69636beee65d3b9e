"""The training loop: windows of pairs, their draws, optimizer steps, evaluations. Entry: `TrainLoop.run`."""

from __future__ import annotations

import math
import signal
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.data import PreferencePair, Windows
from ds_stochdpo.data.dataset import fingerprint_of
from ds_stochdpo.engine import Metrics, StochDPOEngine
from ds_stochdpo.errors import Interrupted, LockstepError
from ds_stochdpo.packing import assign_to_ranks, pair_tokens
from ds_stochdpo.pruning import PairDraw, full_draw, pair_cost
from ds_stochdpo.train.checkpoints import Checkpoints
from ds_stochdpo.train.progress import Progress, share_of
from ds_stochdpo.train.record import RunRecord


@dataclass(frozen=True)
class Schedule:
    """How many optimizer steps a run takes, and of how many pairs.

    Attributes:
        pairs_per_step: Pairs of an optimizer step over all ranks; the last of an epoch may be short.
        steps_per_epoch: Optimizer steps of one pass over the pairs; of a stream, whose length is not known, all steps.
        total_steps: Optimizer steps of the run.
        warmup_steps: Steps in which the learning rate rises.
    """

    pairs_per_step: int
    steps_per_epoch: int
    total_steps: int
    warmup_steps: int


def plan_schedule(config: StochDPOConfig, *, num_pairs: int | None, world_size: int) -> Schedule:
    """Step counts of a run.

    Args:
        config: Settings with batch sizes resolved.
        num_pairs: Pairs of the training split; None: it is a stream, and `max_steps` is set.
        world_size: Ranks.

    Returns:
        The schedule; at least one step, since a short window is a whole optimizer step.
    """
    assert config.per_device_train_batch_size is not None
    assert config.gradient_accumulation_steps is not None
    pairs_per_step = world_size * config.per_device_train_batch_size * config.gradient_accumulation_steps
    steps_per_epoch = config.max_steps if num_pairs is None else math.ceil(num_pairs / pairs_per_step)
    total = config.max_steps if config.max_steps > 0 else math.ceil(config.num_train_epochs * steps_per_epoch)
    warmup = config.warmup_steps
    return Schedule(
        pairs_per_step, steps_per_epoch, total, math.ceil(warmup * total) if 0 < warmup < 1 else int(warmup)
    )


class TrainLoop:
    """Runs the optimizer steps of a training run and logs them."""

    def __init__(
        self,
        engine: StochDPOEngine,
        schedule: Schedule,
        record: RunRecord,
        windows: Windows,
        test_pairs: Sequence[PreferencePair] = (),
        checkpoints: Checkpoints | None = None,
    ) -> None:
        """Set up the loop.

        Args:
            engine: The policy.
            schedule: Step counts.
            record: Where metrics go.
            windows: Training pairs of each step, with reference log-probs if those are cached; alike on every rank.
            test_pairs: Held-out pairs, likewise; none: no evaluation.
            checkpoints: Where the run is saved; None: nowhere.
        """
        self.engine, self.schedule, self.record = engine, schedule, record
        self.windows, self.test_pairs = windows, test_pairs
        self.checkpoints = checkpoints
        self.config = engine.config
        self.evaluations: list[dict[str, Any]] = []
        self._unlogged: list[Metrics] = []
        self._owes_evaluation = False

    def run(self) -> None:
        """Train, with an evaluation before and after. Collective.

        Raises:
            Interrupted: If a rank was sent a signal; where checkpoints are made, the present step then is in one.
        """
        try:
            self._run()
        except Interrupted as stop:
            raise Interrupted(stop.signum, self._keep(signal.Signals(stop.signum).name)) from None

    def _run(self) -> None:
        total = self.schedule.total_steps
        if self.engine.step == 0 and not self.evaluations:
            self.evaluate()
        if self._owes_evaluation:
            self._owes_evaluation = False
            self.evaluate()
        with self._progress("training", total, "step", done=self.engine.step) as bar:
            while self.engine.step < total:
                metrics = self.train_step()
                bar.advance(1, f"loss {metrics['loss']:.4f}, margin {metrics['rewards/margins']:.4f}")
                self._after_step(metrics, is_last=self.engine.step == total)
        self.evaluate()

    def _after_step(self, metrics: Metrics, *, is_last: bool) -> None:
        """What is due after an optimizer step; the checkpoint comes last, so that it covers all that was logged."""
        config, step = self.config, self.engine.step
        self._unlogged.append(metrics)
        if step % config.logging_steps == 0 or is_last:
            self.record.metrics({"step": step, "epoch": self._epochs(), **_summary(self._unlogged)})
            self._unlogged = []
        is_due = config.eval_steps is not None and step % config.eval_steps == 0 and not is_last
        if self.engine.stop_agreed:
            self._owes_evaluation = is_due
            raise Interrupted(self.engine.stop_agreed)
        if is_due:
            self.evaluate()
        if config.save_steps and (step % config.save_steps == 0 or is_last):
            self.save_checkpoint()

    def save_checkpoint(self) -> None:
        """Save a complete checkpoint of the present step; nothing if it is saved already. Collective.

        Raises:
            CheckpointError: On every rank, if it cannot be written.
        """
        if self.checkpoints is None:
            return
        self.checkpoints.save(
            self.engine,
            {
                "passes": self._epochs(),
                "unlogged": [{name: _to_json(value) for name, value in m.items()} for m in self._unlogged],
                "lines": self.record.flush(),
                "first_evaluation": self.evaluations[0] if self.evaluations else None,
                "owes_evaluation": self._owes_evaluation,
            },
        )

    def restore(self, progress: dict[str, Any]) -> None:
        """Take up what `save_checkpoint` kept beside the engine's own state."""
        self._unlogged = [{name: float(value) for name, value in m.items()} for m in progress["unlogged"]]
        self.evaluations = [progress["first_evaluation"]] if progress["first_evaluation"] else []
        self._owes_evaluation = progress.get("owes_evaluation", False)

    def _keep(self, name: str) -> str:
        """Save the present step if the run makes checkpoints; returns what is kept, alike on all ranks."""
        step = self.engine.step
        if not self.config.save_steps:
            return f"{name} after optimizer step {step}; save_steps is not set, so nothing is kept"
        if not step:
            return f"{name} before the first optimizer step: there is nothing to keep"
        self.save_checkpoint()
        kept = f"checkpoint-{step} is complete: go on with --resume_from_checkpoint latest"
        return f"{name} after optimizer step {step}; {kept}"

    def train_step(self) -> Metrics:
        """One optimizer step on the next window. Collective.

        Every rank knows all pairs of the window, so each draws for the whole of it and takes its own share.
        """
        engine, step = self.engine, self.engine.step
        taken = self.windows.take(step)
        engine.epoch, window = taken.epoch, taken.pairs
        if self.config.streaming:
            self._check_alike(window)
        draws = engine.draw(window)
        own = self._share(window, draws)
        if self.config.log_draws:
            self.record.draws(step + 1, [p.pair_id for p in window], draws)
        return engine.train_step([window[i] for i in own], [draws[i] for i in own])

    def evaluate(self) -> None:
        """Evaluate the held-out pairs and log the line. Collective; nothing without held-out pairs."""
        if not self.test_pairs:
            return
        own = self._share(self.test_pairs, [full_draw(len(p.chosen_ids), len(p.rejected_ids)) for p in self.test_pairs])
        with self._progress("evaluating" + share_of(self.engine.ranks), len(own), "pair") as bar:
            metrics = self.engine.evaluate([self.test_pairs[i] for i in own], bar.advance)
        line = {"step": self.engine.step, "epoch": self._epochs()}
        line |= {f"eval_{name}": value for name, value in metrics.items()}
        self.evaluations.append(line)
        self.record.metrics(line)

    def _share(self, pairs: Sequence[PreferencePair], draws: Sequence[PairDraw]) -> list[int]:
        """This rank's part of some pairs, balanced by the work of their draws."""
        config, ranks = self.config, self.engine.ranks
        costs = [
            pair_cost(
                self.engine.shape,
                pair_tokens(pair, draw, share_response_start=config.share_response_start),
                share_prompt=config.share_prompt,
            )
            for pair, draw in zip(pairs, draws, strict=True)
        ]
        return assign_to_ranks(costs, ranks.world_size)[ranks.rank]

    def _check_alike(self, window: Sequence[PreferencePair]) -> None:
        """Each rank reads the stream for itself, and a share of other pairs would be a silent mistake."""
        read = zlib.crc32(fingerprint_of(window).encode())
        if len({row[0] for row in self.engine.ranks.rows([read])}) > 1:
            raise LockstepError(
                f"optimizer step {self.engine.step + 1}: the ranks read different pairs from the stream; "
                "give every rank the same files, or a hub set that does not change."
            )

    def _epochs(self) -> float:
        return self.windows.passes(self.engine.step)

    def _progress(self, title: str, total: int, unit: str, done: int = 0) -> Progress:
        return Progress(title, total, unit, is_shown=self.engine.ranks.is_main, done=done)


def _to_json(value: float) -> float | str:
    """JSON has no word for what is not finite; `float` reads these."""
    return value if math.isfinite(value) else str(value)


def _summary(window: Sequence[Metrics]) -> Metrics:
    """One line for some steps: their mean; the last learning rate; the largest memory."""
    # A step that was passed over has no loss and no gradient.
    taken = [m for m in window if math.isfinite(m["grad_norm"])] or window
    line = {name: sum(m[name] for m in taken) / len(taken) for name in taken[-1]}
    line["steps/skipped"] = window[-1]["steps/skipped"]
    line["learning_rate"] = window[-1]["learning_rate"]
    line["memory/peak_gib"] = max(m["memory/peak_gib"] for m in window)
    return line
