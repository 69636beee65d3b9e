"""Rows of preference files and hub sets, each with the place it came from.

Floor: data. Entry: `find_source`, then `RowSource.rows`. Local files are read here rather than through
`datasets`, so that every row keeps its physical line, rows of different types may share a file, and
nothing is cached.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.data.columns import Row, column_list, renamed_rows
from ds_stochdpo.data.json_rows import json_rows
from ds_stochdpo.data.tally import printable
from ds_stochdpo.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

JSON_SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
DATA_SUFFIXES = (*JSON_SUFFIXES, ".parquet")
_ACCEPTED = ", ".join(DATA_SUFFIXES)
# Data in formats that are not read: a folder that holds some is said to, for its rows would be missed.
_OTHER_SUFFIXES = (".csv", ".tsv", ".arrow", ".ndjson", ".jsonlines", ".txt", ".zst", ".bz2", ".xz", ".zip", ".tar",
                   ".csv.gz", ".tar.gz")  # fmt: skip
# Sidecars that `datasets` writes next to the data.
_METADATA_NAMES = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})


@dataclass(frozen=True)
class RowSource:
    """Where the rows of one split come from.

    Attributes:
        name: Name as the user gave it, for messages.
        files: Files in reading order; empty for a hub set or a saved `datasets` folder.
        hub_split: Split to take where `name` is read through `datasets`.
        column_mapping: Their columns to our names.
        streams: Whether a hub set is read while it is downloaded; files always are read as they are needed.
    """

    name: str
    files: tuple[Path, ...] = ()
    hub_split: str | None = None
    column_mapping: Mapping[str, str] | None = None
    streams: bool = False

    @property
    def parts(self) -> list[str]:
        """What is read, in order, for the run record."""
        return [printable(str(path)) for path in self.files] or [f"{self.name}[{self.hub_split}]"]

    @functools.cached_property
    def hub(self) -> Any:
        """What `datasets` gives for a hub set or a saved folder; of a hub set that streams an `IterableDataset`.

        Raises:
            DataError: If it cannot be loaded.
        """
        return _load_hub(self.name, str(self.hub_split), streaming=self.streams)

    def rows(self, limit: int | None = None) -> Iterator[Row]:
        """Rows in order, each with "file:n".

        For JSON n is the physical line where the row begins; for parquet or a hub set it is the row; both from 1.
        A row may be any JSON value, or a `BrokenRow` for a line that is none; what it holds is not checked here.

        Args:
            limit: Stop after this many rows; None: all.

        Raises:
            DataError: If a file cannot be read or is not what its name says.
            ConfigError: If `column_mapping` names a column that is not there.
        """
        if self.files:
            chained: Iterator[Row] = itertools.chain.from_iterable(_file_rows(path) for path in self.files)
        else:
            chained = _hub_rows(self.hub, self.parts[0])
        rows = itertools.islice(chained, limit)
        return renamed_rows(rows, self.column_mapping) if self.column_mapping else rows


def find_source(config: StochDPOConfig, split: str) -> RowSource:
    """Where the rows of `split` are.

    A folder's files are taken in name order; if some carry the split's name as a word in their path, only
    those. `train` without such files takes all but those named after `dataset_test_split`. A single file has
    no splits.

    Args:
        config: Its `dataset_name`, `dataset_train_split` and `dataset_test_split` decide.
        split: `train` or `test`: which of the two settings to follow.

    Raises:
        ConfigError: If the setting is empty or asks a file for a split.
        DataError: If nothing is there.
    """
    streams = config.streaming and split == "train"
    return replace(_find(config, split), column_mapping=config.column_mapping, streams=streams)


def _find(config: StochDPOConfig, split: str) -> RowSource:
    if not config.dataset_name:
        raise ConfigError(
            "dataset_name is empty; it must be a hub name, a folder or a file of preference pairs: set it."
        )
    if split == "train":
        return _locate(
            config.dataset_name, "dataset_train_split", config.dataset_train_split, config.dataset_test_split
        )
    if split != "test":
        raise ValueError(f"split is {split!r}; allowed: 'train', 'test'")
    wanted = config.dataset_test_split
    if not wanted:
        raise ConfigError("dataset_test_split is not set; it must be a split name or a file: set it to evaluate.")
    if wanted.endswith(DATA_SUFFIXES):
        return RowSource(wanted, (_existing(Path(wanted).expanduser(), "dataset_test_split"),))
    return _locate(config.dataset_name, "dataset_test_split", wanted, None)


def _locate(name: str, key: str, split: str, held_out: str | None) -> RowSource:
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
            return RowSource(name, hub_split=split)
        return RowSource(name, _folder_files(path, key, split, held_out))
    if name.endswith(DATA_SUFFIXES):
        if split != "train":
            raise ConfigError(
                f"{key} is {split!r}, but dataset_name {name} is one file, which has no splits; "
                + ("leave it at 'train'." if key == "dataset_train_split" else "give the path of a file.")
            )
        return RowSource(name, (_existing(path, "dataset_name"),))
    if path.is_file():
        raise DataError(f"dataset_name {name}: this format is not supported; accepted: {_ACCEPTED}.")
    if name.startswith((".", "/", "~")):
        raise DataError(f"dataset_name {name}: no such file or folder.")
    return RowSource(name, hub_split=split)


def _existing(path: Path, key: str) -> Path:
    if not path.is_file():
        raise DataError(f"{key} {path}: no such file.")
    return path


def _folder_files(folder: Path, key: str, split: str, held_out: str | None) -> tuple[Path, ...]:
    try:
        found = sorted(folder.iterdir())
        files = [path for path in found if _is_data_file(path, folder)]
        if not files:
            # A local copy of a hub set keeps its files below data/.
            found = sorted(folder.rglob("*"))
            files = [path for path in found if _is_data_file(path, folder)]
    except OSError as error:
        raise DataError(f"dataset_name {folder}: cannot be read: {error.strerror}.") from error
    left_out = [path for path in found if path.name.endswith(_OTHER_SUFFIXES)]
    if files and left_out:
        logger.warning("%s: not read, for their format: %s; accepted: %s", folder, _names(left_out), _ACCEPTED)
    if not files:
        raise DataError(f"dataset_name {folder}: no data file in this folder; accepted: {_ACCEPTED}.")
    named = tuple(path for path in files if _has_word(path, folder, split))
    if named:
        return named
    if split != "train":
        raise DataError(f"{key} is {split!r}, but no file in {folder} carries that name: {_names(files)}.")
    rest = tuple(path for path in files if not (held_out and _has_word(path, folder, held_out)))
    if not rest:
        raise DataError(f"{folder} has only files of dataset_test_split {held_out!r}: {_names(files)}.")
    return rest


def _is_data_file(path: Path, folder: Path) -> bool:
    hidden = any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)
    return path.name.endswith(DATA_SUFFIXES) and path.name not in _METADATA_NAMES and not hidden and path.is_file()


def _has_word(path: Path, folder: Path, word: str) -> bool:
    pattern = rf"(?<![0-9A-Za-z]){re.escape(word)}(?![0-9A-Za-z])"
    return re.search(pattern, path.relative_to(folder).as_posix()) is not None


def _names(files: list[Path]) -> str:
    return column_list(path.name for path in files)


def _file_rows(path: Path) -> Iterator[Row]:
    if path.name.endswith(".parquet"):
        return _parquet_rows(path)
    return json_rows(path)


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    place, number = printable(str(path)), 0
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield row, f"{place}:{number}"
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(f"{place}: cannot be read as parquet: {error}.") from error


def _load_hub(name: str, split: str, *, streaming: bool) -> Any:
    # Imported here: it takes seconds, and local files do without it.
    import datasets

    try:
        if Path(name).expanduser().is_dir():
            loaded = datasets.load_from_disk(str(Path(name).expanduser()))
            return loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        return datasets.load_dataset(name, split=split, **({"streaming": True} if streaming else {}))
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"dataset_name {name}, split {split}: cannot be loaded: {error}") from error


def _hub_rows(loaded: Any, place: str) -> Iterator[Row]:
    number = 0
    try:
        for number, row in enumerate(loaded, start=1):
            yield row, f"{place}:{number}"
    except (OSError, ValueError) as error:
        raise DataError(f"{place}: cannot be read after row {number}: {error}") from error
