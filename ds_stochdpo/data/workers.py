"""Rows to batches of outcomes, in this process and, when there are many, in others beside it.

Floor: data. Entry: `tokenise_rows`. The order is that of the rows and the batches are the same, however many processes
take part.
"""

from __future__ import annotations

import collections
import itertools
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait

import pyarrow as pa
from tqdm import tqdm

from ds_stochdpo.data.columns import Row
from ds_stochdpo.data.outcome import RowTokeniser
from ds_stochdpo.data.table import Batches, to_batch
from ds_stochdpo.errors import DataError

logger = logging.getLogger(__name__)

BATCH_ROWS = 256
"""Rows of one batch; the last may be shorter."""
ALONE_S = 2.0
"""Seconds of work before other processes are started: a small set is done sooner than they are."""
MOST_PROCESSES = 16
"""Processes by default at most; one process reads the rows for all of them."""
_WAITING_PER_PROCESS = 2
_SECONDS_PER_LINE = 30.0


def tokenise_rows(rows: Iterable[Row], tokenise: RowTokeniser, *, num_proc: int | None = None) -> Batches:
    """Tokenise rows in order.

    Args:
        rows: Rows with their places; read as they are needed.
        tokenise: What to do with each.
        num_proc: Processes beside this one, 1: none; None: the cores this process may use, at most `MOST_PROCESSES`.

    Yields:
        Batches of `BATCH_ROWS` outcomes.

    Raises:
        DataError: If a process dies.
    """
    rows = iter(rows)
    chunks = iter(lambda: list(itertools.islice(rows, BATCH_ROWS)), [])
    if num_proc is None:
        num_proc = min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
    # A daemon, as in another pool, may have no children.
    is_alone = num_proc == 1 or multiprocessing.current_process().daemon
    started = time.monotonic()
    while is_alone or time.monotonic() - started < ALONE_S:
        chunk = next(chunks, None)
        if chunk is None:
            return
        yield _take(tokenise, chunk)
    yield from _in_processes(chunks, tokenise, num_proc)


def _take(tokenise: RowTokeniser, chunk: list[Row]) -> pa.RecordBatch:
    return to_batch([tokenise(row, source) for row, source in chunk])


def _in_processes(chunks: Iterator[list[Row]], tokenise: RowTokeniser, num_proc: int) -> Batches:
    # Forked, so that a script needs no guard for its main part and the tokenizer is there at once.
    context = multiprocessing.get_context("fork")
    waiting: collections.deque[Future[pa.RecordBatch]] = collections.deque()
    with ProcessPoolExecutor(num_proc, context, _start_worker, (tokenise,)) as pool:
        try:
            first = itertools.islice(chunks, _WAITING_PER_PROCESS * num_proc)
            waiting.extend(pool.submit(_take_here, chunk) for chunk in first)
            while waiting:
                yield waiting.popleft().result()
                waiting.extend(pool.submit(_take_here, chunk) for chunk in itertools.islice(chunks, 1))
        except BrokenProcessPool:
            raise DataError(
                f"one of {num_proc} tokenising processes was killed, most often for want of memory; "
                "set dataset_num_proc to fewer."
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_tokenise: RowTokeniser
"""That of a worker process."""


def _start_worker(tokenise: RowTokeniser) -> None:
    global _tokenise
    _tokenise = tokenise
    # Ctrl-C is for the parent; and no worker outlives one that was killed.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _take_here(chunk: list[Row]) -> pa.RecordBatch:
    return _take(_tokenise, chunk)


def with_progress(batches: Iterable[pa.RecordBatch], title: str, shown: bool | None) -> Batches:
    """Show how many rows are done: a bar on a terminal, a line in the log every half minute elsewhere.

    Args:
        batches: What is counted.
        title: Before the numbers.
        shown: True: always a bar; False: nothing.
    """
    disable = None if shown is None else not shown
    begun = said = time.monotonic()
    # Whoever does the work for the others speaks, also a rank that is silent otherwise.
    level = logging.INFO if logger.isEnabledFor(logging.INFO) else logging.WARNING
    with tqdm(desc=title, unit="row", disable=disable, leave=False) as bar:
        done = 0
        for batch in batches:
            done += batch.num_rows
            bar.update(batch.num_rows)
            now = time.monotonic()
            if bar.disable and shown is None and now - said > _SECONDS_PER_LINE:
                said = now
                logger.log(level, "%s: %d rows, %.0f rows a second", title, done, done / (now - begun))
            yield batch
