"""Torch's FLOP counter, completed by what it counts as nothing. Entry: `count_flops`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

_Size = Sequence[int]


@contextmanager
def count_flops() -> Iterator[FlopCounterMode]:
    """Torch's FLOP counter, with what torch 2.13 counts as nothing.

    That is the CPU's fused attention, `addmm_`, and the products of experts.

    Yields:
        The counter; `get_total_flops()` after the block.
    """
    kernel: Any = torch.ops.aten
    formulas = {
        kernel._scaled_dot_product_flash_attention_for_cpu: _fused_forward,
        kernel._scaled_dot_product_flash_attention_for_cpu_backward: _fused_backward,
        kernel.addmm_: _added_product,
        kernel._grouped_mm: _grouped_product,
    }
    counter = FlopCounterMode(display=False, custom_mapping=formulas)
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    with counter:
        yield counter


class _NoModules:
    """Stands for torch's tracker of modules, whose hooks keep tensors alive and fail where autograd runs inside."""

    parents = frozenset({"Global"})

    def __enter__(self) -> _NoModules:
        return self

    def __exit__(self, *_: object) -> None:
        return None


def _fused_forward(query: _Size, key: _Size, value: _Size, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _fused_backward(grad: _Size, query: _Size, key: _Size, value: _Size, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))


def _added_product(total: _Size, left: _Size, right: _Size, *_: Any, **__: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


def _grouped_product(left: _Size, right: _Size, *_: Any, **__: Any) -> int:
    # Each row of one input meets the matrix of one group, whichever of the two has a dimension of groups.
    return 2 * left[-2] * left[-1] * right[-1]
