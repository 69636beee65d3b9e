"""Preference alignment with a stochastically pruned DPO computation graph, on DeepSpeed ZeRO-3.

    engine = ds_stochdpo.initialize(model=lm, config=ds_stochdpo.StochDPOConfig(...), deepspeed="zero3.json")
    pairs = ds_stochdpo.add_reference(engine, pairs)
    metrics = engine.train_step(my_pairs)
    engine.export("aligned")

Everything but the settings and errors is imported on first use, so that settings load without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ds_stochdpo.config import PruningPlan, StochDPOConfig
from ds_stochdpo.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ExportError,
    Interrupted,
    LaunchError,
    LockstepError,
    ModelError,
    NonFiniteError,
    StochDPOError,
)

if TYPE_CHECKING:
    from ds_stochdpo.data import PreferencePair, load_pairs
    from ds_stochdpo.engine import StochDPOEngine, add_reference, initialize
    from ds_stochdpo.packing import draw

__version__ = "0.1.0"

_LAZY = {
    "PreferencePair": ("ds_stochdpo.data", "PreferencePair"),
    "StochDPOEngine": ("ds_stochdpo.engine", "StochDPOEngine"),
    "add_reference": ("ds_stochdpo.engine", "add_reference"),
    "draw": ("ds_stochdpo.packing", "draw"),
    "initialize": ("ds_stochdpo.engine", "initialize"),
    "load_pairs": ("ds_stochdpo.data", "load_pairs"),
}

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "ExportError",
    "Interrupted",
    "LaunchError",
    "LockstepError",
    "ModelError",
    "NonFiniteError",
    "PreferencePair",
    "PruningPlan",
    "StochDPOConfig",
    "StochDPOEngine",
    "StochDPOError",
    "add_reference",
    "draw",
    "initialize",
    "load_pairs",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _LAZY[name]
    return getattr(importlib.import_module(module), attribute)
