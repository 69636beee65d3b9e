"""Outcomes as Arrow batches, the form in which they pass between processes and rest on disk.

Floor: data. Entry: `to_batch`, `from_batch`, which undo each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ds_stochdpo.data.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

Batches = Generator[pa.RecordBatch, None, None]
"""Close one that is not read to its end: it may hold processes and a lock."""

_IDS = ("prompt_ids", "chosen_ids", "rejected_ids")
_LISTS = ("full_lengths", "cuts", "notes", "ignored")
_PLAIN = ("source", "reason", "detail", "content")
SCHEMA = pa.schema(
    [(name, pa.list_(pa.int64())) for name in (*_IDS, "full_lengths")]
    + [(name, pa.list_(pa.string())) for name in ("cuts", "notes", "ignored")]
    + [(name, pa.string()) for name in ("source", "reason", "detail")]
    + [("content", pa.binary())]
)


def to_batch(outcomes: Sequence[Outcome]) -> pa.RecordBatch:
    """One record batch of `SCHEMA`, a row for each outcome."""
    columns = [pa.array([getattr(o, f.name) for o in outcomes], type=f.type) for f in SCHEMA]
    return pa.record_batch(columns, schema=SCHEMA)


def from_batch(batch: pa.RecordBatch) -> Iterator[Outcome]:
    """The outcomes of a batch; their ids are views of its memory, which stays as long as one of them does."""
    ids = {name: _views(batch.column(name)) for name in _IDS}
    lists = {name: batch.column(name).to_pylist() for name in _LISTS}
    plain = {name: batch.column(name).to_pylist() for name in _PLAIN}
    make: Callable[..., Any] = Outcome
    for row in range(batch.num_rows):
        yield make(
            **{name: column[row] for name, column in (plain | ids).items()},
            **{name: tuple(column[row]) for name, column in lists.items()},
        )


def _views(column: pa.ListArray) -> list[np.ndarray]:
    values, ends = column.values.to_numpy(), column.offsets.to_numpy()
    return [values[start:end] for start, end in itertools.pairwise(ends)]
