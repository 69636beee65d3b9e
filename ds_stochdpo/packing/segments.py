"""Boundaries of packed sequences, in the form that variable-length attention kernels take.

Entry: `AttentionSegments`, `cu_seqlens`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

INT32_MAX = 2**31 - 1


def cu_seqlens(lengths: Sequence[int]) -> Tensor:
    """Cumulative sequence lengths as flash-attention wants them.

    >>> cu_seqlens([2, 3]).tolist()
    [0, 2, 5]

    Args:
        lengths: Length of each packed sequence in tokens, each at least 1.

    Returns:
        int32 tensor [len(lengths) + 1], starting at 0, strictly increasing, ending at the number of packed tokens.

    Raises:
        ValueError: If a length is below 1 or not a whole number, or their sum does not fit 32 bits.
    """
    ends, total = [0], 0
    for length in lengths:
        try:
            whole = operator.index(length)
        except TypeError:
            raise ValueError(f"sequence length {length!r} is not a whole number of tokens.") from None
        if whole < 1:
            raise ValueError(f"sequence length {whole}: leave empty sequences out before packing.")
        total += whole
        if total > INT32_MAX:
            raise ValueError(
                f"{total} packed tokens exceed the kernels' limit of {INT32_MAX}; lower max_tokens_per_micro_batch."
            )
        ends.append(total)
    return torch.tensor(ends, dtype=torch.int32)


@dataclass(frozen=True, eq=False)
class AttentionSegments:
    """Runs of packed queries and the keys each of them sees, causal and aligned at the last key.

    Attributes:
        q_lens: Queries of each segment; the packed queries are these segments one after the other.
        k_lens: Keys of each segment, at least as many as its queries.
        k_index: Rows of the key source, segment by segment, int64 [sum(k_lens)]; None: the keys are the lane's own
            rows in order. The key source is [captured prompt rows, the lane's own rows].
        cu_seqlens_q: int32 boundaries of the queries.
        cu_seqlens_k: int32 boundaries of the keys.
    """

    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    k_index: Tensor | None = None
    cu_seqlens_q: Tensor = field(default=None)  # type: ignore[assignment]
    cu_seqlens_k: Tensor = field(default=None)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.cu_seqlens_q is None:
            object.__setattr__(self, "cu_seqlens_q", cu_seqlens(self.q_lens))
            object.__setattr__(self, "cu_seqlens_k", cu_seqlens(self.k_lens))

    @property
    def max_seqlen_q(self) -> int:
        """Longest run of queries, in tokens."""
        return max(self.q_lens, default=0)

    @property
    def max_seqlen_k(self) -> int:
        """Longest run of keys, in tokens."""
        return max(self.k_lens, default=0)
