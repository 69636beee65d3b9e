"""The gradient norm of the last step, at every ZeRO stage. Entry: `GradientNorm`."""

from __future__ import annotations

import math
from typing import Any

import torch


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
        # Other stages drop such a gradient by themselves and say so in this attribute, by which DeepSpeed counts the
        # step as skipped. A parameter without gradient is left alone by every torch optimizer, and so is its state.
        optimizer.overflow = not math.isfinite(self._at_stage0)  # type: ignore[attr-defined]
        if optimizer.overflow:  # type: ignore[attr-defined]
            for parameter in parameters:
                parameter.grad = None

    @property
    def was_dropped(self) -> bool:
        """Whether the last step's gradient was not finite, so that no weight changed; alike on all ranks."""
        return bool(getattr(self._engine.optimizer, "overflow", False))

    def last(self) -> float:
        """Norm of the last step; nan before the first and where the gradient was not finite."""
        norm = self._engine.get_global_grad_norm() if self._at_stage0 is None else self._at_stage0
        return float("nan") if norm is None or self.was_dropped else float(norm)
