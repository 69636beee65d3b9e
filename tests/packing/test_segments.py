"""Boundaries of packed sequences as the kernels take them."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_stochdpo.packing import AttentionSegments, cu_seqlens


@given(st.lists(st.integers(1, 10**6)))
def test_boundaries_are_int32_and_strictly_increasing(lengths):
    ends = cu_seqlens(lengths)
    assert ends.dtype == torch.int32
    assert ends.tolist() == list(itertools.accumulate(lengths, initial=0))
    assert (ends.diff() > 0).all()


def test_more_tokens_than_32_bits_hold_are_refused_with_the_limit():
    with pytest.raises(ValueError, match=r"packed tokens exceed.*limit of 2147483647.*max_tokens_per_micro_batch"):
        cu_seqlens([2**30, 2**30, 5])
    assert cu_seqlens([2**30, 2**30 - 1]).tolist() == [0, 2**30, 2**31 - 1]


@pytest.mark.parametrize("length", [3.0, 2.5, "3", None, np.float64(4)])
def test_lengths_that_are_not_whole_numbers_are_refused(length):
    with pytest.raises(ValueError, match="is not a whole number of tokens"):
        cu_seqlens([2, length])


@pytest.mark.parametrize("length", [0, -1, np.int64(0)])
def test_empty_sequences_are_refused(length):
    with pytest.raises(ValueError, match=f"sequence length {length}: leave empty"):
        cu_seqlens([1, 1, 9, length])


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8])
def test_numpy_whole_numbers_are_fine(kind):
    ends = cu_seqlens(np.array([1, 1, 9], kind))
    assert ends.tolist() == [0, 1, 2, 11]
    assert ends.dtype == torch.int32


def test_numpy_sums_do_not_wrap():
    # Two int32 lengths overflow when numpy adds them.
    with pytest.raises(ValueError, match=r"packed tokens exceed.*limit of 2147483647"):
        cu_seqlens(np.array([2**30, 2**30, 5], np.int32))


def test_longest_lengths_are_python_whole_numbers():
    segments = AttentionSegments((2, 5), (7, 5))
    assert (segments.max_seqlen_q, segments.max_seqlen_k) == (5, 7)
    assert type(segments.max_seqlen_q) is type(segments.max_seqlen_k) is int
    assert segments.cu_seqlens_q.tolist() == [0, 2, 7]
    assert segments.cu_seqlens_k.tolist() == [0, 7, 12]
    empty = AttentionSegments((), ())
    assert (empty.max_seqlen_q, empty.max_seqlen_k) == (0, 0)
    assert empty.cu_seqlens_k.tolist() == [0]
