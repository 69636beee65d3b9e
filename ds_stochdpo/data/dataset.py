"""From settings to the tokenised pairs of one split.

Floor: data. Entry: `load_pairs`.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.data.cache import cached_batches
from ds_stochdpo.data.columns import column_list
from ds_stochdpo.data.outcome import Outcome, RowTokeniser
from ds_stochdpo.data.pair import PreferencePair
from ds_stochdpo.data.rows import RowSource, find_source
from ds_stochdpo.data.table import Batches, from_batch
from ds_stochdpo.data.tally import BadRowError, Tally
from ds_stochdpo.data.truncate import LengthLimits, resolve_limits
from ds_stochdpo.data.workers import tokenise_rows, with_progress
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

    Rows that cannot become a pair are dropped and counted, each reason with its first lines, or end the load:
    `errors.ROW_FAULTS` says which.

    Args:
        config: Its data settings: `dataset_*`, `column_mapping`, `data_errors`, `max_length`, `max_prompt_length`,
            `truncation_mode`, `max_samples`.
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
    with closing(read_outcomes(config, tokenizer, source, limits, progress=progress)) as outcomes:
        return fold(outcomes, source, limits.max_length, data_errors=config.data_errors)


def read_outcomes(
    config: StochDPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    source: RowSource,
    limits: LengthLimits,
    *,
    progress: bool | None = None,
) -> Generator[Outcome, None, None]:
    """What becomes of every row of a source, in order, from the cache if it is there; close it if not read to its end.

    Args:
        config: Its `max_samples` and `dataset_num_proc`.
        tokenizer: As in `load_pairs`.
        source: The rows.
        limits: Limits in force.
        progress: As in `load_pairs`.
    """

    def make() -> Batches:
        tokenise = RowTokeniser(tokenizer, limits)
        batches = tokenise_rows(source.rows(config.max_samples), tokenise, num_proc=config.dataset_num_proc)
        return with_progress(batches, f"tokenising {source.name}", progress)

    with closing(cached_batches(config, source, tokenizer, limits, make)) as batches:
        for batch in batches:
            yield from from_batch(batch)


def fold(
    outcomes: Iterable[Outcome], source: RowSource, max_length: int | None, *, data_errors: str = "stop"
) -> PairSet:
    """The pairs of all rows and their account, which is logged.

    Args:
        outcomes: Of every row, in order.
        source: Where the rows come from, for messages.
        max_length: Limit that was in force.
        data_errors: `stop` or `skip`, as in the settings.

    Raises:
        DataError: If a row ends the run, or no row is usable.
    """
    account = Account(data_errors)
    pairs = [pair for outcome in outcomes if (pair := account.take(outcome)) is not None]
    account.check_used(source)
    account.log(source)
    tally = account.tally
    return PairSet(pairs, tally.counts, tally.first_lines, fingerprint_of(pairs), max_length, source.parts)


def fingerprint_of(pairs: Sequence[PreferencePair]) -> str:
    """sha256 over pair ids, lengths and token ids, as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for pair in pairs:
        add_to_fingerprint(digest, pair)
    return digest.hexdigest()


def add_to_fingerprint(digest: hashlib._Hash, pair: PreferencePair) -> None:
    """Add one pair to a digest that `fingerprint_of` would make."""
    parts = (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids)
    # Fixed byte order and lengths first: the digest is the same on every machine, and two ways to cut
    # the same tokens into parts do not collide.
    digest.update(np.array([pair.pair_id, *map(len, parts)], dtype="<i8").tobytes())
    for ids in parts:
        digest.update(ids.astype("<i8").tobytes())


class Account:
    """Turns outcomes into pairs, in the order of the rows, and counts.

    Attributes:
        tally: Counts and first lines so far.
        ignored: Columns that no row used, in the order met.
    """

    def __init__(self, data_errors: str = "stop", *, finds_duplicates: bool = True) -> None:
        """Start counting.

        Args:
            data_errors: `stop` or `skip`, as in the settings.
            finds_duplicates: Count rows that repeat an earlier one; takes 32 bytes a row.
        """
        self.tally = Tally(data_errors)
        self.ignored: dict[str, None] = {}
        self._seen: set[bytes] | None = set() if finds_duplicates else None

    def take(self, outcome: Outcome) -> PreferencePair | None:
        """The pair of the next row, whose id is the number of rows before it; None: the row is dropped.

        Raises:
            DataError: If the row ends the run.
        """
        row_index = self.tally.counts["read"]
        self.tally.counts["read"] += 1
        self.ignored.update(dict.fromkeys(outcome.ignored))
        if outcome.reason:
            self.tally.drop(BadRowError(outcome.reason, outcome.detail), outcome.source)
            return None
        self.tally.counts["used"] += 1
        keys = [*(f"truncated/{cut}" for cut in outcome.cuts), *(f"noted/{note}" for note in outcome.notes)]
        if self._repeats_row(outcome.content):
            keys.append("noted/duplicate rows")
        for key in keys:
            self.tally.add(key, outcome.source)
        ids = (outcome.prompt_ids, outcome.chosen_ids, outcome.rejected_ids)
        return PreferencePair(row_index, *ids, outcome.source)

    def _repeats_row(self, content: bytes) -> bool:
        if self._seen is None:
            return False
        num_before = len(self._seen)
        self._seen.add(content)
        return len(self._seen) == num_before

    def check_used(self, source: RowSource) -> None:
        """Refuse a set without a pair.

        Raises:
            DataError: If no row was read, or none was usable, with the reasons.
        """
        num_read = self.tally.counts["read"]
        if num_read == 0:
            raise DataError(f"{', '.join(source.parts)}: no rows; the set must hold at least one preference pair.")
        if self.tally.counts["used"] == 0:
            columns = f" Columns not used: {column_list(self.ignored)}." if self.ignored else ""
            raise DataError(
                f"{source.name}: 0 of {num_read} rows usable. {'; '.join(self.tally.describe('dropped/'))}.{columns}"
            )

    def log(self, source: RowSource) -> None:
        """One line for the set, and one for each thing that was dropped, cut or noted."""
        tally = self.tally
        logger.info("%s: %d rows read, %d used", source.name, tally.counts["read"], tally.counts["used"])
        level = _level()
        if self.ignored:
            logger.log(level, "%s: columns not used: %s", source.name, column_list(self.ignored))
        for prefix in ("dropped/", "truncated/", "noted/"):
            for phrase in tally.describe(prefix):
                logger.log(level, "%s: %s %s", source.name, prefix[:-1], phrase)

    def log_first(self, source: RowSource, keys: Iterable[str]) -> None:
        """One line for the first row under each of `keys`, while more may come."""
        for key in keys:
            detail = self.tally.first_details.get(key, "")
            place, held = self.tally.first_lines[key][0], f" ({detail})" if detail else ""
            logger.log(_level(), "%s: %s, first at %s%s", source.name, key.replace("/", " ", 1), place, held)


def _level() -> int:
    # Every rank reads the same rows; one says what it found.
    return logging.WARNING if os.environ.get("RANK", "0") == "0" else logging.DEBUG
