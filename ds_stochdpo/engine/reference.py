"""Per-token log-probs of the reference, scored once and kept on disk. Entry: `add_reference`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ds_stochdpo.data import PreferencePair
from ds_stochdpo.data.dataset import fingerprint_of
from ds_stochdpo.engine.completeness import as_readable_as_others
from ds_stochdpo.engine.engine import StochDPOEngine
from ds_stochdpo.errors import ConfigError, StochDPOError
from ds_stochdpo.packing import assign_to_ranks

logger = logging.getLogger(__name__)

CACHE_FORMAT = 2
"""Raised when the layout of a cache file or the meaning of its numbers changes."""


def reference_key(*, weights: str, tokenizer: str, pairs: str, max_length: int, dtype: str) -> str:
    """Name of a cache file: everything its numbers depend on, and nothing else.

    Learning rate, beta and output folder are not in it, so a sweep shares one cache.

    Args:
        weights: Digest of the weight files, from `weights_digest`.
        tokenizer: Digest of the tokenizer.
        pairs: Fingerprint of the tokenised pairs.
        max_length: Longest sequence, in tokens.
        dtype: Dtype the model was run in.

    Returns:
        Hexadecimal sha256.
    """
    parts = {"format": CACHE_FORMAT, "weights": weights, "tokenizer": tokenizer, "pairs": pairs}
    parts |= {"max_length": max_length, "dtype": dtype}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def add_reference(
    engine: StochDPOEngine,
    pairs: Sequence[PreferencePair],
    cache_file: Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[PreferencePair]:
    """Give each pair the log-probs of the reference. Collective.

    The reference is the engine's frozen model if it has one, else the policy as it is before the first step. The work
    is spread over ranks by length; every node keeps a cache file of its own, so no shared disk is needed.

    Args:
        engine: Engine whose policy is still untrained, unless the cache is there.
        pairs: All pairs, alike on every rank.
        cache_file: Where the log-probs are kept; None: nowhere. The file knows its pairs, not its model: name it by
            `reference_key`, so that another model gets another file.
        progress: Told the number of pairs this rank has finished after each micro-batch.

    Returns:
        Pairs with reference log-probs, in the given order.

    Raises:
        ConfigError: If they would have to be computed by a policy that has been trained or loaded from a checkpoint.
        StochDPOError: If a log-prob is not finite.
    """
    cached = _read_cache(cache_file, pairs) if cache_file else None
    # Every rank: one rank without its file makes all of them compute.
    if all(row[0] for row in engine.ranks.rows([int(cached is not None)])):
        assert cached is not None
        if engine.ranks.is_main:
            logger.info("reference log-probs: read from %s", cache_file)
        return _attach(pairs, cached)
    if engine.reference is None and not engine.is_initial_policy:
        raise ConfigError(
            "the reference log-probs are not in the cache, and the policy has already been trained: "
            "its scores are not the reference's. Restore reference_cache_dir, or start from the initial model."
        )
    logps = _compute(engine, pairs, progress)
    if cache_file and engine.ranks.is_local_main:
        _write_cache(cache_file, pairs, logps)
    engine.ranks.barrier()
    return _attach(pairs, logps)


def _compute(
    engine: StochDPOEngine, pairs: Sequence[PreferencePair], progress: Callable[[int], None] | None
) -> np.ndarray:
    costs = [len(p.prompt_ids) + len(p.chosen_ids) + len(p.rejected_ids) for p in pairs]
    share = assign_to_ranks(costs, engine.ranks.world_size)[engine.ranks.rank]
    scores = engine.score([pairs[i] for i in share], progress, of_reference=engine.reference is not None)
    own = {i: (s.chosen_logps, s.rejected_logps) for i, s in zip(share, scores, strict=True)}
    # Every rank: each needs the log-probs of pairs that others scored.
    merged = {i: both for part in engine.ranks.gather_objects(own) for i, both in part.items()}
    logps = np.concatenate([part for i in range(len(pairs)) for part in merged[i]])
    if not np.isfinite(logps).all():
        bad = [
            pairs[i].source or pairs[i].pair_id
            for i, both in merged.items()
            if not np.isfinite(np.concatenate(both)).all()
        ]
        raise StochDPOError(
            f"the reference gives log-probs that are not finite for {bad[:5]}; look at these rows and the model."
        )
    return logps


def _attach(pairs: Sequence[PreferencePair], logps: np.ndarray) -> list[PreferencePair]:
    done, start = [], 0
    for pair in pairs:
        middle = start + len(pair.chosen_ids)
        stop = middle + len(pair.rejected_ids)
        done.append(
            dataclasses.replace(pair, chosen_ref_logps=logps[start:middle], rejected_ref_logps=logps[middle:stop])
        )
        start = stop
    return done


_ABOVE_ZERO = 1e-2


def _write_cache(cache_file: Path, pairs: Sequence[PreferencePair], logps: np.ndarray) -> None:
    metadata = {"format": str(CACHE_FORMAT), "pairs": fingerprint_of(pairs)}
    try:
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_file.parent, prefix=".partial-") as folder:
            partial = Path(folder) / cache_file.name
            save_file({"logps": logps}, partial, metadata=metadata)
            as_readable_as_others(partial)
            os.replace(partial, cache_file)
    except (OSError, SafetensorError) as error:
        # The log-probs are in memory, so the run goes on; the next one computes them again.
        logger.warning("reference cache %s cannot be written (%s); going on without", cache_file, error)


def _read_cache(cache_file: Path, pairs: Sequence[PreferencePair]) -> np.ndarray | None:
    if not cache_file.exists():
        return None
    try:
        with safe_open(cache_file, framework="np") as stored:
            logps, metadata = stored.get_tensor("logps"), stored.metadata() or {}
    except (OSError, SafetensorError) as error:
        logger.warning("reference cache %s cannot be read (%s); computing it again", cache_file, error)
        return None
    fits = metadata.get("pairs") == fingerprint_of(pairs) and metadata.get("format") == str(CACHE_FORMAT)
    fits = fits and len(logps) == sum(len(p.chosen_ids) + len(p.rejected_ids) for p in pairs)
    # Log-probabilities are at most 0, up to rounding.
    if not fits or not np.isfinite(logps).all() or not logps.any() or (logps > _ABOVE_ZERO).any():
        logger.warning("reference cache %s does not fit these pairs; computing it again", cache_file)
        return None
    return logps
