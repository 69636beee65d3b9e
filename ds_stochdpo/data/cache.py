"""Tokenised rows on disk, beside what `datasets` keeps there and in its file format (Arrow streams).

Floor: data. Entry: `cache_key`, then `cached_batches`. One file a key: `<key>-<digest of the file>.arrow`, so that
neither a half-written nor a damaged file is ever taken for a whole one. Of several processes that want the same key
the first one makes the file and the others wait for its lock, not in a collective: no timeout, however long it takes.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock
import pyarrow as pa
from huggingface_hub.constants import HF_HOME

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.data.rows import RowSource
from ds_stochdpo.data.table import SCHEMA, Batches
from ds_stochdpo.data.truncate import LengthLimits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_DIGEST_DIGITS = 32
_PACKAGES = ("transformers", "tokenizers", "jinja2")
Make = Callable[[], Batches]


def cache_folder() -> Path:
    """Where the files are: `ds_stochdpo` in the cache of `datasets`, which HF_DATASETS_CACHE or HF_HOME move."""
    return Path(os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME) / "datasets").expanduser() / "ds_stochdpo"


def cache_key(
    config: StochDPOConfig, source: RowSource, tokenizer: PreTrainedTokenizerBase, limits: LengthLimits
) -> str:
    """Digest of everything that the tokenised rows depend on, and of nothing else.

    That is the content of the files and their names (which are part of each row's place), the tokenizer as it
    serialises itself, its chat template, the limits, the settings that choose rows, and the code that does it.
    """
    template = json.dumps(tokenizer.chat_template, sort_keys=True)
    parts = {
        "code": _code_digest(),
        "names": source.parts,
        "rows": _content_digest(source),
        "settings": [config.max_samples, config.column_mapping and dict(config.column_mapping)],
        "limits": dataclasses.asdict(limits),
        "tokenizer": tokenizer_digest(tokenizer),
        # Templates may write the date.
        "date": str(datetime.date.today()) if "strftime_now" in template else "",
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:_DIGEST_DIGITS]


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 over what decides how a tokenizer encodes: vocabulary, merges, normaliser, special tokens, template."""
    named: dict[str, Any] = {
        "class": f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}",
        "template": tokenizer.chat_template,
        "special": tokenizer.special_tokens_map,
        "split_special": getattr(tokenizer, "split_special_tokens", None),
    }
    digest = hashlib.sha256(json.dumps(named, sort_keys=True, default=str).encode())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str())
        # What an earlier call happened to ask for; every call sets them anew.
        del state["truncation"], state["padding"]
        digest.update(json.dumps(state, sort_keys=True).encode())
    else:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            _add_files(digest, sorted(path for path in Path(folder).rglob("*") if path.is_file()))
    return digest.hexdigest()


def _code_digest() -> str:
    """Any change of the data layer makes new files, so that no format number must be kept up by hand."""
    digest = hashlib.sha256(repr([importlib.metadata.version(name) for name in _PACKAGES]).encode())
    _add_files(digest, sorted(Path(__file__).parent.glob("*.py")))
    return digest.hexdigest()


def _content_digest(source: RowSource) -> str:
    digest = hashlib.sha256()
    folder = Path(source.name).expanduser()
    if source.files:
        _add_files(digest, source.files)
    elif folder.is_dir():
        _add_files(digest, sorted(path for path in folder.rglob("*") if path.is_file()))
    else:
        digest.update(source.hub._fingerprint.encode())
    return digest.hexdigest()


def _add_files(digest: Any, files: Iterable[Path]) -> None:
    # The content, not size and time: those survive an edit with a coarse clock, or a copy that keeps times.
    for path in files:
        with path.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())


def cached_batches(
    config: StochDPOConfig, source: RowSource, tokenizer: PreTrainedTokenizerBase, limits: LengthLimits, make: Make
) -> Batches:
    """The batches of a source, from disk or made and kept.

    Close the iterator if it is not read to its end: it holds a lock while it makes them.

    Args:
        config: As in `cache_key`.
        source: As in `cache_key`.
        tokenizer: As in `cache_key`.
        limits: As in `cache_key`.
        make: Makes the batches; called at most once.

    Returns:
        The same batches, whether there was a file or none, and whether one could be written.
    """
    folder, stamp = cache_folder(), _stamp(source)
    try:
        key = cache_key(config, source, tokenizer, limits)
    except OSError:
        # Whatever cannot be read is named by those who read it.
        yield from make()
        return
    if (found := _read(folder, key)) is not None:
        yield from found
        return
    with _lock(folder, key) as is_locked, closing(make()) as made:
        # It may have been made while this process waited.
        if not is_locked:
            yield from made
        elif (found := _read(folder, key)) is not None:
            yield from found
        else:
            yield from _keep(made, _NewFile(folder, key), lambda: _stamp(source) == stamp)


def _stamp(source: RowSource) -> list[tuple[int, int, int]]:
    stats = [path.stat() for path in source.files if path.exists()]
    return [(stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats]


def _read(folder: Path, key: str) -> list[pa.RecordBatch] | None:
    for path in folder.glob(f"{key}-*.arrow"):
        try:
            if path.name == _file_name(key, path):
                # Mapped, not read: the ranks of a node share one copy in memory.
                batches = list(pa.ipc.open_stream(pa.memory_map(str(path))))
                logger.info("tokenised rows read from %s", path)
                return batches
            logger.warning("%s is damaged; tokenising its rows again", path)
            path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s cannot be read (%s); tokenising its rows again", path, error)
    return None


def _file_name(key: str, path: Path) -> str:
    with path.open("rb") as stream:
        return f"{key}-{hashlib.file_digest(stream, 'sha256').hexdigest()[:_DIGEST_DIGITS]}.arrow"


@contextmanager
def _lock(folder: Path, key: str) -> Iterator[bool]:
    """Hold the key's lock, waiting for whoever has it; gives False where there can be none."""
    lock = filelock.FileLock(folder / f"{key}.lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(blocking=False)
        except filelock.Timeout:
            logger.warning("another process is tokenising the same rows; waiting for it")
            lock.acquire()
    except (OSError, NotImplementedError) as error:
        logger.warning("tokenised rows cannot be kept in %s (%s); going on without", folder, error)
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _keep(batches: Batches, file: _NewFile, is_current: Callable[[], bool]) -> Batches:
    """Pass batches on and write them, under their name once they are all there."""
    with file:
        for batch in batches:
            file.add(batch)
            yield batch
        if is_current():
            file.finish()
        else:
            logger.warning("the rows changed while they were read; their tokens are not kept")


class _NewFile:
    """A cache file in the making. It says so where the disk refuses, and the run goes on without it."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.key = folder, key
        # Whoever holds the lock may replace what a killed process left here.
        self._partial = folder / f".{key}.partial"
        self._is_good = True

    def __enter__(self) -> _NewFile:
        with self._giving_up():
            self._file = self._partial.open("wb")
            self._writer = pa.ipc.new_stream(self._file, SCHEMA)
        return self

    def __exit__(self, *_: Any) -> None:
        with suppress(OSError, AttributeError):
            self._file.close()
        with suppress(OSError):
            self._partial.unlink(missing_ok=True)

    def add(self, batch: pa.RecordBatch) -> None:
        if self._is_good:
            with self._giving_up():
                self._writer.write_batch(batch)

    def finish(self) -> None:
        if self._is_good:
            with self._giving_up():
                self._writer.close()
                self._file.close()
                self._partial.replace(self.folder / _file_name(self.key, self._partial))

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            logger.warning("tokenised rows cannot be kept in %s (%s); going on without", self.folder, error)
            self._is_good = False
