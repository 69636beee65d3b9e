"""Cutting: rule by rule, and that no pair ever loses a branch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_stochdpo.data.render import RenderedPair
from ds_stochdpo.data.tally import BadRowError
from ds_stochdpo.data.truncate import LengthLimits, truncate
from ds_stochdpo.errors import ConfigError
from tests.data.texts import user
from tests.tiny import pair_rows, tiny_tokenizer

WORDS = " ".join(["egg"] * 300)


def rendered(num_prompt, num_chosen, num_rejected):
    """Ids that say where they were: prompt from 100, chosen from 1000, rejected from 2000."""
    sizes = ((100, num_prompt), (1000, num_chosen), (2000, num_rejected))
    return RenderedPair(*(np.arange(start, start + size) for start, size in sizes))


PROMPT, CHOSEN, REJECTED = (f"{part} (max_length)" for part in ("prompt", "chosen", "rejected"))
# prompt, chosen, rejected -> (first and last prompt id), lengths after the cut, what was cut.
CASES = [
    ((5, 3, 4), LengthLimits(9, None), (100, 104), (5, 3, 4), []),
    ((5, 3, 4), LengthLimits(None, None), (100, 104), (5, 3, 4), []),
    ((6, 3, 4), LengthLimits(9, None), (101, 105), (5, 3, 4), [PROMPT]),
    ((6, 3, 4), LengthLimits(9, None, "keep_start"), (100, 104), (5, 3, 4), [PROMPT]),
    ((20, 9, 4), LengthLimits(10, None), (115, 119), (5, 5, 4), [PROMPT, CHOSEN]),
    ((3, 9, 12), LengthLimits(10, None), (100, 102), (3, 7, 7), [CHOSEN, REJECTED]),
    ((6, 3, 4), LengthLimits(40, 2), (104, 105), (2, 3, 4), ["prompt (max_prompt_length)"]),
    ((6, 3, 4), LengthLimits(None, 2, "keep_start"), (100, 101), (2, 3, 4), ["prompt (max_prompt_length)"]),
    ((6, 3, 4), LengthLimits(6, 5), (101, 105), (5, 1, 1),
     ["prompt (max_prompt_length)", CHOSEN, REJECTED]),
    ((6, 3, 4), LengthLimits(2, None), (105, 105), (1, 1, 1),
     [PROMPT, CHOSEN, REJECTED]),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "limits", "ends", "lengths", "cuts"), CASES)
def test_cut_rules(sizes, limits, ends, lengths, cuts):
    pair, found = truncate(rendered(*sizes), limits)
    assert (pair.prompt_ids[0], pair.prompt_ids[-1]) == ends
    assert tuple(map(len, (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids))) == lengths
    assert (pair.chosen_ids[0], pair.rejected_ids[0]) == (1000, 2000)
    assert found == cuts


@pytest.mark.parametrize(
    ("mode", "repeated", "expected"),
    [
        ("keep_end", False, [100, 104, 105]),
        ("keep_end", True, [103, 104, 105]),
        ("keep_start", False, [100, 101, 102]),
    ],
)
def test_begin_token_survives_unless_it_opens_every_turn(mode, repeated, expected):
    pair = rendered(6, 3, 4)
    if repeated:
        pair.prompt_ids[1] = 100
    cut, _ = truncate(pair, LengthLimits(None, 3, mode, bos_id=100))
    assert cut.prompt_ids.tolist() == expected


def test_responses_equal_after_the_cut_are_refused():
    pair = RenderedPair(np.arange(3), np.array([7, 8, 9]), np.array([7, 8, 10]))
    assert truncate(pair, LengthLimits(6, None))[1] == []
    with pytest.raises(BadRowError, match="identical after truncation"):
        truncate(pair, LengthLimits(4, None))


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 60)] * 3),
    max_length=st.integers(2, 50),
    prompt_limit=st.none() | st.integers(1, 49),
    mode=st.sampled_from(["keep_end", "keep_start"]),
)
def test_no_branch_is_starved(sizes, max_length, prompt_limit, mode):
    if prompt_limit is not None and prompt_limit >= max_length:
        return
    pair, _ = truncate(rendered(*sizes), LengthLimits(max_length, prompt_limit, mode, bos_id=100))
    lengths = tuple(map(len, (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids)))
    assert min(lengths) >= 1
    assert lengths[0] + max(lengths[1:]) <= max_length
    for before, after in zip(sizes[1:], lengths[1:], strict=True):
        assert after == min(before, max_length - lengths[0])


def test_a_long_prompt_keeps_its_end_and_both_responses(load, tokenizer):
    long = {"prompt": WORDS + " end.", "chosen": " Blue.", "rejected": " Green!"}
    loaded = load([*pair_rows(5), long], max_length=32)
    assert loaded.counts == {"read": 6, "used": 6, "truncated/prompt (max_length)": 1}
    pair = loaded.pairs[5]
    assert len(pair.prompt_ids) + max(len(pair.chosen_ids), len(pair.rejected_ids)) == 32
    assert tokenizer.decode(pair.chosen_ids) == " Blue.<|im_end|>"
    assert tokenizer.decode(pair.prompt_ids).endswith(" egg end.")


def test_pairs_equal_after_the_cut_are_counted(load):
    row = {"prompt": "Count.", "chosen": WORDS + " yes", "rejected": WORDS + " no"}
    loaded = load([*pair_rows(2), row], max_length=64)
    assert loaded.counts == {"read": 3, "used": 2, "dropped/identical after truncation": 1}


def test_the_models_context_is_the_default_and_the_bound(load):
    row = {"prompt": [user(WORDS)], "chosen": "Blue.", "rejected": "Green."}
    loaded = load([row], context_length=256)
    pair = loaded.pairs[0]
    assert loaded.max_length == 256
    assert len(pair.prompt_ids) + max(len(pair.chosen_ids), len(pair.rejected_ids)) == 256
    with pytest.raises(ConfigError, match=r"max_length is 400.* 256 positions"):
        load([row], max_length=400, context_length=256)
    with pytest.raises(ConfigError, match=r"max_prompt_length is 256.*max_length \(256\)"):
        load([row], max_prompt_length=256, context_length=256)


def test_begin_token_survives_in_a_loaded_set(load):
    tok = tiny_tokenizer(bos="<s>", adds_bos=True)
    pair = load([{"prompt": WORDS, "chosen": " Blue.", "rejected": " Green!"}], tok, max_prompt_length=8).pairs[0]
    assert tok.decode(pair.prompt_ids).startswith("<s>")
    assert len(pair.prompt_ids) == 8
