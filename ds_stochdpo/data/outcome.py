"""What becomes of one row: token ids, or why there are none.

Floor: data. Entry: `RowTokeniser`, a function of one row and its place that keeps nothing between rows, so that
rows may be taken in any process and the results kept on disk. Whatever looks at several rows (counts, duplicates,
the layout of a whole file) is in `dataset.py`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ds_stochdpo.data.layouts import canonical_row
from ds_stochdpo.data.render import PairRenderer
from ds_stochdpo.data.tally import BadRowError, printable
from ds_stochdpo.data.truncate import LengthLimits, truncate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def _no_ids() -> np.ndarray:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Outcome:
    """What became of one row.

    Attributes:
        source: "file:line" of the row.
        reason: Why the row makes no pair, a key of `ROW_FAULTS`, which says whether that ends the run. Empty: a pair.
        detail: What such a row holds, for the message.
        prompt_ids: Shared prompt, int64 [P], P >= 1; empty without a pair.
        chosen_ids: Preferred response, int64 [T_w], T_w >= 1; empty without a pair.
        rejected_ids: Other response, int64 [T_l], T_l >= 1; empty without a pair.
        full_lengths: Tokens of the three parts before truncation; zeros if the row did not get that far.
        cuts: Parts that were cut, each with the limit that cut it.
        notes: What is worth counting about a row that is used.
        ignored: Columns that were not used.
        content: sha256 of the row's canonical form, the same for rows that repeat each other; empty where its layout
            was not recognised.
    """

    source: str
    reason: str = ""
    detail: str = ""
    prompt_ids: np.ndarray = field(default_factory=_no_ids)
    chosen_ids: np.ndarray = field(default_factory=_no_ids)
    rejected_ids: np.ndarray = field(default_factory=_no_ids)
    full_lengths: tuple[int, int, int] = (0, 0, 0)
    cuts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    content: bytes = b""


class RowTokeniser:
    """Takes one row through layout, template, tokenizer and truncation."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, limits: LengthLimits) -> None:
        self.limits = limits
        self._renderer = PairRenderer(tokenizer)

    def __call__(self, row: Any, source: str) -> Outcome:
        """The outcome of one row; never an error, so that the caller decides in the order of the rows.

        Args:
            row: Any JSON value.
            source: "file:line" of the row.
        """
        known: dict[str, Any] = {}
        try:
            canonical = canonical_row(row)
            text = repr((canonical.prompt, canonical.chosen, canonical.rejected))
            known["content"] = hashlib.sha256(text.encode()).digest()
            known["ignored"] = tuple(printable(key) for key in row if key not in canonical.columns)
            rendered = self._renderer.render(canonical)
            parts = (rendered.prompt_ids, rendered.chosen_ids, rendered.rejected_ids)
            known["full_lengths"] = tuple(len(ids) for ids in parts)
            cut, cuts = truncate(rendered, self.limits)
        except BadRowError as bad:
            return Outcome(source, bad.reason, bad.detail, **known)
        ids: dict[str, Any] = {
            "prompt_ids": cut.prompt_ids,
            "chosen_ids": cut.chosen_ids,
            "rejected_ids": cut.rejected_ids,
        }
        return Outcome(source, cuts=tuple(cuts), notes=rendered.notes, **ids, **known)
