"""DeepSpeed: the only layer that imports it. Settings, process group, training engine, reference and export."""

from ds_stochdpo.engine.distributed import Ranks, process_group
from ds_stochdpo.engine.engine import Metrics, StochDPOEngine
from ds_stochdpo.engine.frozen import FrozenReference, frozen_settings
from ds_stochdpo.engine.initialize import initialize
from ds_stochdpo.engine.loading import (
    check_token_ids,
    load_model_config,
    load_policy,
    load_tokenizer,
    weights_digest,
)
from ds_stochdpo.engine.reference import add_reference, reference_key
from ds_stochdpo.engine.settings import resolve_settings
from ds_stochdpo.engine.step import PairScores

__all__ = [
    "FrozenReference",
    "Metrics",
    "PairScores",
    "Ranks",
    "StochDPOEngine",
    "add_reference",
    "check_token_ids",
    "frozen_settings",
    "initialize",
    "load_model_config",
    "load_policy",
    "load_tokenizer",
    "process_group",
    "reference_key",
    "resolve_settings",
    "weights_digest",
]
