"""The gradient norm of the last step, at every ZeRO stage. Entry: `GradientNorm`."""

from __future__ import annotations

import math
from typing import Any

import torch


class NonFiniteGradientError(ArithmeticError):
    """The gradient holds inf or nan, so no step was taken; alike on all ranks."""


class GradientNorm:
    """Global norm before clipping. At stage 0 it also clips, since DeepSpeed's fp32 stage 0 reports no norm."""

    def __init__(self, ds_engine: Any, *, stage: int, max_norm: float | None) -> None:
        """Watch the engine's optimizer.

        Args:
            ds_engine: DeepSpeed engine.
            stage: Its ZeRO stage.
            max_norm: Where stage 0 clips; 0 or None: nowhere. Other stages clip by the DeepSpeed JSON.
        """
        self._engine = ds_engine
        self._limit = max_norm or math.inf
        self._at_stage0: float | None = None
        if stage == 0:
            ds_engine.optimizer.register_step_pre_hook(self._measure_and_clip)

    def _measure_and_clip(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._at_stage0 = float(torch.nn.utils.clip_grad_norm_(parameters, self._limit))
        if not math.isfinite(self._at_stage0):
            # Other stages leave the weights alone by themselves; here nothing else stands before the update.
            raise NonFiniteGradientError

    def last(self) -> float:
        """Norm of the last step; nan before the first.

        Raises:
            NonFiniteGradientError: If that step's gradient was not finite, so that DeepSpeed left it out.
        """
        norm = self._engine.get_global_grad_norm() if self._at_stage0 is None else self._at_stage0
        if norm is None:
            return float("nan")
        if not math.isfinite(norm):
            raise NonFiniteGradientError
        return float(norm)
