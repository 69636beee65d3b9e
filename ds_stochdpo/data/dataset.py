"""From settings to the tokenised pairs of one split.

Floor: data. Entry: `load_pairs`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.data.layouts import CanonicalRow, UnknownLayoutError, canonical_row
from ds_stochdpo.data.pair import PreferencePair
from ds_stochdpo.data.render import PairRenderer
from ds_stochdpo.data.rows import Row, RowSource, find_source
from ds_stochdpo.data.tally import BadRowError, Tally
from ds_stochdpo.data.truncate import LengthLimits, resolve_limits, truncate
from ds_stochdpo.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class PairSet:
    """The pairs of one split and the account of how they came about.

    Attributes:
        pairs: In file order; `pair_id` is the row's index over all files, so dropped rows leave gaps.
        counts: `read`, `used`, `dropped/<reason>`, `truncated/<part (limit)>` (of used pairs),
            `noted/<what>`.
        first_lines: First places ("file:line") of every dropped, truncated and noted key.
        fingerprint: sha256 over pair ids and token ids; the same rows, tokenizer, template and limits give
            the same one, whatever the other settings are.
        max_length: Limit in force on prompt plus response, in tokens; None: no limit.
        files: What was read, in order.
    """

    pairs: list[PreferencePair]
    counts: dict[str, int]
    first_lines: dict[str, list[str]]
    fingerprint: str
    max_length: int | None
    files: list[str]


def load_pairs(
    config: StochDPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: str = "train",
    context_length: int | None = None,
    progress: bool | None = None,
) -> PairSet:
    """Read, check, template, tokenise and truncate the pairs of one split.

    Rows that cannot become a pair are dropped and counted, each reason with its first lines.

    Args:
        config: Its data settings: `dataset_*`, `max_length`, `max_prompt_length`, `truncation_mode`,
            `max_samples`.
        tokenizer: The model's, with its chat template if the rows hold messages.
        split: `train` or `test`: `dataset_train_split` or `dataset_test_split` of the settings.
        context_length: Positions the model has; default and upper bound of `max_length`.
        progress: Show a progress bar on stderr; None: if that is a terminal.

    Raises:
        ConfigError: If a setting contradicts the files or the model.
        DataError: If a file cannot be read, has no known layout, or no row is usable.
    """
    source = find_source(config, split)
    limits = resolve_limits(config, context_length, tokenizer.bos_token_id)
    shown = None if progress is None else not progress
    rows = tqdm(source.rows(config.max_samples), desc=f"tokenising {split}", unit="row", disable=shown, leave=False)
    builder = _PairBuilder(PairRenderer(tokenizer), limits)
    pairs = list(builder.build(iter(rows)))
    tally = builder.tally
    tally.counts["used"] = len(pairs)
    _check_used(tally, source, builder.ignored_columns)
    _log_account(tally, source, builder.ignored_columns)
    return PairSet(pairs, tally.counts, tally.first_lines, fingerprint_of(pairs), limits.max_length, source.parts)


def fingerprint_of(pairs: Sequence[PreferencePair]) -> str:
    """sha256 over pair ids, lengths and token ids, as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for pair in pairs:
        parts = (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids)
        # Fixed byte order and lengths first: the digest is the same on every machine, and two ways to cut
        # the same tokens into parts do not collide.
        digest.update(np.array([pair.pair_id, *map(len, parts)], dtype="<i8").tobytes())
        for ids in parts:
            digest.update(ids.astype("<i8").tobytes())
    return digest.hexdigest()


class _PairBuilder:
    """Takes rows through layout, rendering and truncation, and keeps the account."""

    def __init__(self, renderer: PairRenderer, limits: LengthLimits) -> None:
        self.renderer = renderer
        self.limits = limits
        self.tally = Tally()
        self.ignored_columns: dict[str, None] = {}
        self._seen: set[bytes] = set()
        self._has_known_layout = False

    def build(self, rows: Iterator[Row]) -> Iterator[PreferencePair]:
        for row_index, (row, source) in enumerate(rows):
            self.tally.counts["read"] += 1
            try:
                yield self._build_pair(self._recognise(row, source), row_index, source)
            except BadRowError as bad:
                self.tally.drop(bad, source)

    def _recognise(self, row: object, source: str) -> CanonicalRow:
        try:
            canonical = canonical_row(row, source)
        except UnknownLayoutError as error:
            # The first row tells a wrong file from a file with a hole in it.
            if not self._has_known_layout:
                raise
            raise BadRowError("missing column", str(error)) from None
        self._has_known_layout = True
        if isinstance(row, dict):
            self.ignored_columns.update(dict.fromkeys(str(key) for key in row if key not in canonical.columns))
        return canonical

    def _build_pair(self, row: CanonicalRow, row_index: int, source: str) -> PreferencePair:
        rendered, cuts = truncate(self.renderer.render(row, source), self.limits)
        for cut in cuts:
            self.tally.add(f"truncated/{cut}", source)
        if _repeats_prompt(row):
            self.tally.add("noted/response repeats prompt", source)
        pair = PreferencePair(row_index, rendered.prompt_ids, rendered.chosen_ids, rendered.rejected_ids, source)
        key = hashlib.sha256(repr((row.prompt, row.chosen, row.rejected)).encode()).digest()
        if key in self._seen:
            self.tally.add("noted/duplicate rows", source)
        self._seen.add(key)
        return pair


def _repeats_prompt(row: CanonicalRow) -> bool:
    if not isinstance(row.prompt, str) or not row.prompt.strip():
        return False
    return all(isinstance(side, str) and side.startswith(row.prompt) for side in (row.chosen, row.rejected))


def _check_used(tally: Tally, source: RowSource, ignored: dict[str, None]) -> None:
    num_read = tally.counts["read"]
    if num_read == 0:
        raise DataError(f"{', '.join(source.parts)}: no rows; the set must hold at least one preference pair.")
    if tally.counts["used"] == 0:
        columns = f" Columns not used: {', '.join(ignored)}." if ignored else ""
        raise DataError(
            f"{source.name}: 0 of {num_read} rows usable. {'; '.join(tally.describe('dropped/'))}.{columns}"
        )


def _log_account(tally: Tally, source: RowSource, ignored: dict[str, None]) -> None:
    logger.info("%s: %d rows read, %d used", source.name, tally.counts["read"], tally.counts["used"])
    if ignored:
        logger.warning("%s: columns not used: %s", source.name, ", ".join(ignored))
    for prefix, verb in (("dropped/", "dropped"), ("truncated/", "truncated"), ("noted/", "noted")):
        for phrase in tally.describe(prefix):
            logger.warning("%s: %s %s", source.name, verb, phrase)
