"""One tokenised preference pair: what leaves the data layer and enters packing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ds_stochdpo.errors import DataError


@dataclass(frozen=True, eq=False)
class PreferencePair:
    """Token ids of one pair after templating and truncation.

    Attributes:
        pair_id: Row index after concatenating the files; key of the draws and of the reference cache.
        prompt_ids: Shared prompt, int64 [P], P >= 1.
        chosen_ids: Preferred response, its end token included, int64 [T_w], T_w >= 1.
        rejected_ids: Other response, int64 [T_l], T_l >= 1; never equal to `chosen_ids`.
        source: "file:line" the pair came from.
        chosen_ref_logps: Reference log-prob of each chosen token in nats, float32 [T_w]; None: no reference.
        rejected_ref_logps: Same for the rejected response, float32 [T_l].
    """

    pair_id: int
    prompt_ids: np.ndarray
    chosen_ids: np.ndarray
    rejected_ids: np.ndarray
    source: str = ""
    chosen_ref_logps: np.ndarray | None = None
    rejected_ref_logps: np.ndarray | None = None

    def __post_init__(self) -> None:
        """Refuse what no layer above could make sense of.

        Raises:
            DataError: If ids are not a non-empty 1-D integer array, or reference log-probs do not fit their response.
        """
        for name in ("prompt_ids", "chosen_ids", "rejected_ids"):
            ids = getattr(self, name)
            if not isinstance(ids, np.ndarray) or ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
                raise DataError(f"pair {self.pair_id}: {name} must be a 1-D integer array of at least one token id.")
        for side, ids, logps in (
            ("chosen", self.chosen_ids, self.chosen_ref_logps),
            ("rejected", self.rejected_ids, self.rejected_ref_logps),
        ):
            if logps is not None and logps.shape != ids.shape:
                raise DataError(f"pair {self.pair_id}: {len(ids)} {side} tokens, but {len(logps)} reference log-probs.")

    @property
    def shared_start(self) -> int:
        """Number of tokens with which both responses begin alike."""
        shortest = min(len(self.chosen_ids), len(self.rejected_ids))
        differs = np.flatnonzero(self.chosen_ids[:shortest] != self.rejected_ids[:shortest])
        return int(differs[0]) if len(differs) else shortest
