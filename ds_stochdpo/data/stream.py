"""Pairs read while a run goes on, for sets that are too large to be read ahead.

Floor: data. Entry: `open_stream`, then `StreamWindows`. Nothing is kept but the account, so memory does not grow with
the stream; nothing is shuffled: optimizer steps take the rows in the order of the stream, which starts anew at its end.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.data.dataset import Account, add_to_fingerprint
from ds_stochdpo.data.order import Window
from ds_stochdpo.data.outcome import RowTokeniser
from ds_stochdpo.data.pair import PreferencePair
from ds_stochdpo.data.rows import RowSource, find_source
from ds_stochdpo.data.truncate import resolve_limits
from ds_stochdpo.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class PairStream:
    """The pairs of a split, as often as they are asked for, and the account of the first pass over them.

    Attributes:
        source: Where the rows come from.
        max_length: Limit in force on prompt plus response, in tokens; None: no limit.
    """

    def __init__(
        self,
        source: RowSource,
        tokenise: RowTokeniser,
        *,
        data_errors: str = "stop",
        max_rows: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """Set up the stream; nothing is read yet.

        Args:
            source: Where the rows come from.
            tokenise: What makes a row a pair.
            data_errors: `stop` or `skip`, as in the settings.
            max_rows: Rows of one pass at most.
            vocab_size: Rows of the model's embedding; None: token ids are not checked.
        """
        self.source, self.max_length = source, tokenise.limits.max_length
        self._tokenise, self._max_rows, self._vocab_size = tokenise, max_rows, vocab_size
        self._data_errors = data_errors
        self._account = self._new_account()
        self._digest = hashlib.sha256()

    @property
    def files(self) -> list[str]:
        """What is read, in order."""
        return self.source.parts

    @property
    def counts(self) -> dict[str, int]:
        """Counts of the first pass so far, as in `PairSet`; repeated rows are not looked for."""
        return self._account.tally.counts

    @property
    def first_lines(self) -> dict[str, list[str]]:
        """First places of each count, as in `PairSet`."""
        return self._account.tally.first_lines

    @property
    def fingerprint(self) -> str:
        """Digest of the first pass so far; after the whole of it, that of the set of the same rows."""
        return self._digest.hexdigest()

    def read(self, epoch: int) -> Iterator[PreferencePair]:
        """One pass over the pairs. Only pass 0 is counted, and it can be read once.

        Args:
            epoch: Number of the pass.

        Raises:
            DataError: At a row that ends the run, a token the model does not know, or at the end of a pass without a
                pair.
        """
        account = self._account if epoch == 0 else self._new_account()
        for row, place in self.source.rows(self._max_rows):
            known = set(account.tally.counts)
            pair = account.take(self._tokenise(row, place))
            if epoch == 0:
                account.log_first(self.source, account.tally.counts.keys() - known)
            if pair is None:
                continue
            self._check_ids(pair)
            if epoch == 0:
                add_to_fingerprint(self._digest, pair)
            yield pair
        account.check_used(self.source)

    def _new_account(self) -> Account:
        return Account(self._data_errors, finds_duplicates=False)

    def log_account(self) -> None:
        """Log the counts of the first pass; the first row of each was logged when it came."""
        self._account.log(self.source)

    def _check_ids(self, pair: PreferencePair) -> None:
        if self._vocab_size is None:
            return
        largest = max(int(ids.max()) for ids in (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids))
        if largest >= self._vocab_size:
            raise DataError(
                f"{pair.source}: token id {largest} >= embedding rows {self._vocab_size}; "
                "use the model's own tokenizer, or resize the model's embeddings and save it first."
            )


def open_stream(
    config: StochDPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    context_length: int | None = None,
    vocab_size: int | None = None,
) -> PairStream:
    """The training split as a stream.

    Args:
        config: Its data settings, as in `load_pairs`.
        tokenizer: As in `load_pairs`.
        context_length: As in `load_pairs`.
        vocab_size: As in `PairStream`.

    Raises:
        ConfigError: If a setting contradicts the files or the model.
        DataError: If a file is not there.
    """
    limits = resolve_limits(config, context_length, tokenizer.bos_token_id)
    tokenise = RowTokeniser(tokenizer, limits)
    return PairStream(
        find_source(config, "train"),
        tokenise,
        data_errors=config.data_errors,
        max_rows=config.max_samples,
        vocab_size=vocab_size,
    )


class StreamWindows:
    """Windows in the order of a stream; the last one of a pass may be short, as with a set."""

    def __init__(self, stream: PairStream, *, pairs_per_step: int) -> None:
        """Set up the windows.

        Args:
            stream: From its start.
            pairs_per_step: Pairs of one optimizer step over all ranks, at least 1.
        """
        self._windows = _cut(stream, pairs_per_step)
        self._num_taken, self._epoch = 0, 0

    def take(self, step: int) -> Window:
        """The window of an optimizer step, counted from 0; what lies before it is read and left out.

        Raises:
            DataError: As `PairStream.read`.
            ValueError: If the stream is past it.
        """
        if step < self._num_taken:
            raise ValueError(f"the stream is at optimizer step {self._num_taken}; it cannot go back to {step}")
        if step > self._num_taken:
            logger.info("reading the stream up to optimizer step %d", step)
        window = next(itertools.islice(self._windows, step - self._num_taken, None))
        self._num_taken, self._epoch = step + 1, window.epoch
        return window

    def passes(self, step: int) -> float:
        """Whole passes before the last window that was taken: how long a pass is, is not known ahead."""
        return float(self._epoch)


def _cut(stream: PairStream, pairs_per_step: int) -> Iterator[Window]:
    for epoch in itertools.count():
        pairs = stream.read(epoch)
        while window := list(itertools.islice(pairs, pairs_per_step)):
            yield Window(epoch, window)
