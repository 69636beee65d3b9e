"""A reference that is never trained: sharded at rest, gathered a layer at a time. Entry: `FrozenReference`."""

from __future__ import annotations

import dataclasses
from typing import Any

import deepspeed
import torch
from torch import Tensor

from ds_stochdpo.engine.compiled_ops import guarded_builds
from ds_stochdpo.engine.settings import zero_stage
from ds_stochdpo.model import TwoLaneModel
from ds_stochdpo.packing import LaneLayout

_ZERO3_KEYS = (
    "offload_param",
    "stage3_prefetch_bucket_size",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_param_persistence_threshold",
    "log_trace_cache_warnings",
)


def frozen_settings(ds: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed dict of a frozen model: always ZeRO-3, with the policy's own gathering where it has one.

    Args:
        ds: DeepSpeed dict of the policy, from `resolve_settings`.

    Returns:
        Dict without optimizer.
    """
    zero = ds.get("zero_optimization", {}) if zero_stage(ds) == 3 else {}
    return {
        "train_micro_batch_size_per_gpu": ds["train_micro_batch_size_per_gpu"],
        "bf16": ds["bf16"],
        "steps_per_print": ds["steps_per_print"],
        "zero_optimization": {"stage": 3, **{key: zero[key] for key in _ZERO3_KEYS if key in zero}},
    }


class FrozenReference:
    """Scores the rows of a micro-batch under the reference, with the same lanes as the policy.

    Attributes:
        module: The two-lane model.
        deepspeed: Its DeepSpeed engine, ZeRO-3 without optimizer.
    """

    def __init__(self, module: TwoLaneModel, ds: dict[str, Any]) -> None:
        """Shard the model. Collective.

        Args:
            module: Two-lane model; its gradients are switched off.
            ds: Dict from `frozen_settings`.
        """
        module.requires_grad_(False)
        deepspeed.utils.set_z3_leaf_modules(module, [module.layer_class])
        self.module = module
        with guarded_builds():
            self.deepspeed, *_ = deepspeed.initialize(model=module, config=ds)
        self.deepspeed.eval()

    @torch.no_grad()
    def __call__(self, layout: LaneLayout) -> tuple[Tensor, Tensor]:
        """Log-probs as `TwoLaneModel` gives them, without gradient. Collective."""
        live, frozen = self.deepspeed(layout)
        return live, frozen

    def attach(self, layout: LaneLayout) -> LaneLayout:
        """The micro-batch with this model's log-probs as reference: same rows, same weights. Collective."""
        live_logp_K, frozen_logp_K = self(layout)
        num_detached = len(layout.detached_rows.row_K)
        parts = {
            "live_rows": live_logp_K,
            "detached_rows": frozen_logp_K[:num_detached],
            "frozen_rows": frozen_logp_K[num_detached:],
        }
        rows = {
            name: dataclasses.replace(getattr(layout, name), ref_K=logp_K.double()) for name, logp_K in parts.items()
        }
        return dataclasses.replace(layout, **rows)

    def release(self) -> None:
        """Free the shards; the object is of no use afterwards."""
        self.deepspeed.destroy()
        del self.deepspeed, self.module
