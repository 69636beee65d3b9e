"""What happens to an optimizer step whose loss or gradient is not finite. Entry: `FiniteGuard`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from ds_stochdpo.data.pair import PreferencePair
from ds_stochdpo.engine.distributed import Ranks
from ds_stochdpo.errors import NonFiniteError, StochDPOError

logger = logging.getLogger(__name__)

NUM_NAMED = 20
"""Pair ids that a message names."""


class FiniteGuard:
    """Stops the run at a step that is not finite, or lets it pass over some of them.

    Attributes:
        in_a_row: Steps just passed over without one that was taken between them.
    """

    def __init__(self, ranks: Ranks, *, skips: bool, limit: int) -> None:
        """Set the rule.

        Args:
            ranks: This process among the others.
            skips: Whether such a step is passed over rather than the end.
            limit: Most steps passed over in a row.
        """
        self._ranks, self._skips, self._limit = ranks, skips, limit
        self._seen: list[tuple[list[int], Tensor]] = []
        self._stopped = ""
        self.in_a_row = 0

    def require_running(self) -> None:
        """Refuse a further step after one that stopped the run.

        Raises:
            StochDPOError: Then.
        """
        if self._stopped:
            raise StochDPOError(f"this engine has stopped: {self._stopped}")

    def factor(self, sums: Tensor, pairs: Sequence[PreferencePair]) -> Tensor:
        """What the surrogate of a micro-batch is multiplied by: 1, or nan where its sums are not finite.

        A loss can be infinite where its gradient is not. With the factor the gradient is nan on every rank, for which
        DeepSpeed drops it and leaves weights and optimizer alone, at every stage. No device waits for it.
        """
        is_finite = torch.isfinite(sums).all()
        self._seen.append(([p.pair_id for p in pairs], is_finite))
        return torch.where(is_finite, 1.0, torch.nan)

    def judge(self, step: int, loss: float, *, was_dropped: bool) -> None:
        """Go on, warn, or stop. Collective where the step was dropped, which all ranks see alike.

        Args:
            step: Number of the optimizer step, from 1.
            loss: Its loss over all ranks.
            was_dropped: Whether its gradient was not finite, so that nothing changed.

        Raises:
            NonFiniteError: If the step was dropped and steps may not be, or too many were in a row.
        """
        seen, self._seen = self._seen, []
        if not was_dropped:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        what = f"optimizer step {step}: {self._cause(loss, seen)}"
        if not self._skips:
            self._stop(
                f"{what}. The weights are those before the step. Lower the learning rate, look at these pairs, or set "
                "non_finite: skip to pass over such steps."
            )
        if self.in_a_row > self._limit:
            self._stop(
                f"{what}. This is number {self.in_a_row} in a row, more than non_finite_limit {self._limit} allows. "
                "The weights are those before these steps. Lower the learning rate, or look at these pairs."
            )
        if self._ranks.is_main:
            logger.warning("%s. The step is skipped, number %d in a row.", what, self.in_a_row)

    def _stop(self, message: str) -> NoReturn:
        self._stopped = message
        raise NonFiniteError(message)

    def _cause(self, loss: float, seen: Sequence[tuple[list[int], Tensor]]) -> str:
        # Every rank: the pairs of a step lie on all of them.
        shares = self._ranks.gather_objects([(ids, bool(is_finite)) for ids, is_finite in seen])
        batches = [batch for share in shares for batch in share]
        broken = sorted(i for ids, is_finite in batches if not is_finite for i in ids)
        ids = broken or sorted(i for ids, _ in batches for i in ids)
        named = ", ".join(map(str, ids[:NUM_NAMED])) + (f" and {len(ids) - NUM_NAMED} more" * (len(ids) > NUM_NAMED))
        if broken:
            return f"the loss is {loss}; pair ids of the micro-batches where it is not finite: {named}"
        return f"the gradient is not finite (loss {loss}); pair ids of the step: {named}"
