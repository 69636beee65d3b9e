"""Files of anything: the loader ends in one of its own errors, or accounts for every row. Never a traceback.

Runs for FUZZ_SECONDS, 5 unless set; tests/run.sh sets 60.
"""

import gzip
import json
import os
import re
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.data import load_pairs
from ds_stochdpo.errors import StochDPOError
from tests.tiny import CHAT, tiny_tokenizer

SECONDS = float(os.environ.get("FUZZ_SECONDS", "5"))
TOOL_CHAT = CHAT.replace(
    "{{ m['content'] }}", "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
)
BY_ROLE = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% for m in messages %}"
    "{{ m.content | trim }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}{{ tools | length }}"
)
TOKENIZERS = [
    tiny_tokenizer(),
    tiny_tokenizer(template=TOOL_CHAT, bos="<s>", adds_bos=True),
    tiny_tokenizer(template=BY_ROLE, eos=None, pad=None),
    tiny_tokenizer(template=None),
]

GOOD = {"prompt": "Name one.", "chosen": "Blue.", "rejected": "Green."}

# Half surrogate pairs, control tokens and tags are what breaks tokenizers, templates and transcripts.
texts = st.one_of(
    st.text(st.characters(exclude_categories=[]), max_size=8),
    st.sampled_from([
        "", " ", "yes", "no", "<|im_end|>", "<s>", "\u2028", "\ufeff", "\ud800", "x\udfff",
        "{{ m }}", "[]", "{}", "null", "egg " * 40,
        "\n\nHuman: a\n\nAssistant:", "\n\nHuman: a\n\nAssistant: b", '{"name": "wx"}',
    ]),
)  # fmt: skip
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts)
junk = st.recursive(scalars, lambda c: st.lists(c, max_size=3) | st.dictionaries(texts, c, max_size=3), max_leaves=6)
roles = st.sampled_from(["user", "assistant", "system", "tool", "human", "gpt", "function_call", "observation", "bot"])
calls = st.just([{"id": "t", "type": "function", "function": {"name": "wx", "arguments": "{}"}}]) | junk
parts = st.lists(st.fixed_dictionaries({"type": st.just("text")}, optional={"text": texts, "value": texts}), max_size=2)
messages = st.one_of(
    st.fixed_dictionaries({"role": roles, "content": texts}),
    st.fixed_dictionaries({"from": roles, "value": texts}),
    st.fixed_dictionaries(
        {"role": roles | junk}, optional={"content": texts | parts | junk, "tool_calls": calls, "function_call": junk}
    ),
)
conversations = st.lists(messages, max_size=4)
asked = st.fixed_dictionaries({"role": st.just("user"), "content": texts})
answered = st.fixed_dictionaries({"role": st.just("assistant"), "content": texts})
calling = st.fixed_dictionaries({"role": st.just("assistant"), "tool_calls": calls | junk}, optional={"content": texts})
told = st.fixed_dictionaries({"role": st.just("tool"), "content": texts | junk})
sides = st.one_of(texts, st.lists(answered, min_size=1, max_size=2), answered, conversations, junk)
tools = st.one_of(st.just('[{"name": "wx"}]'), st.lists(st.just({"name": "wx"}) | junk, max_size=2), junk)
rows = st.one_of(
    st.fixed_dictionaries({"prompt": texts, "chosen": texts, "rejected": texts}),
    st.fixed_dictionaries(
        {"prompt": st.lists(asked, min_size=1, max_size=2), "chosen": st.lists(answered, min_size=1, max_size=1),
         "rejected": st.lists(answered, min_size=1, max_size=1)},
        optional={"tools": tools, "chat_template_kwargs": junk},
    ),
    st.fixed_dictionaries(
        {"prompt": st.lists(asked | calling | told, min_size=1, max_size=3),
         "chosen": st.lists(answered | calling, min_size=1, max_size=2), "rejected": answered},
        optional={"tools": tools},
    ),
    st.fixed_dictionaries({"chosen": texts, "rejected": texts}),
    st.fixed_dictionaries(
        {"chosen": sides, "rejected": sides},
        optional={
            "prompt": texts | conversations | junk, "conversations": conversations | junk, "tools": tools,
            "instruction": texts | junk, "input": texts | junk, "history": junk, "system": texts | junk, "id": junk,
            "chat_template_kwargs": junk,
        },
    ),
    st.dictionaries(st.sampled_from(["messages", "label", "text", "chosen_messages", "rejected_messages"]), sides),
    junk,
)  # fmt: skip

rows = st.builds(
    lambda row, more: {**more, **row} if isinstance(row, dict) else row,
    rows,
    st.just({}) | st.dictionaries(texts, junk, max_size=2),
)


def encoded(row, escaped):
    # A half pair that is not escaped makes bytes that are no UTF-8.
    return json.dumps(row, ensure_ascii=escaped).encode("utf-8", "surrogatepass")


lines = st.one_of(
    st.builds(encoded, rows, st.booleans()),
    st.builds(encoded, rows, st.booleans()),
    st.builds(lambda row, n: encoded(row, True)[:n], rows, st.integers(0, 60)),
    st.binary(max_size=12).map(lambda raw: raw.replace(b"\n", b"")),
    st.sampled_from([b"", b"  ", b"[]", b"[" * 3000, b"1" * 5000, b"\xff\xfe", b"\xef\xbb\xbf", b'{"a":1}{"b":2}']),
)


@st.composite
def files(draw):
    """Name and content of a file, and how many rows it must have; None: not known."""
    mark = draw(st.sampled_from([b"", b"", b"\xef\xbb\xbf"]))
    if draw(st.integers(0, 4)) == 0:
        array = draw(st.lists(rows, min_size=draw(st.sampled_from([3, 3, 1, 0])), max_size=5))
        array = [GOOD, *array] if draw(st.booleans()) else array
        content, count = mark + json.dumps(array, indent=draw(st.none() | st.integers(0, 2))).encode(), len(array)
    else:
        written = draw(st.lists(lines, min_size=draw(st.sampled_from([4, 4, 1, 0])), max_size=7))
        # Behind a good row, faults are counted that would refuse the file where they stand first.
        written = [encoded(GOOD, True), *written] if draw(st.integers(0, 3)) else written
        content = mark + draw(st.sampled_from([b"\n", b"\r\n"])).join(written)
        filled = [line for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip(b" \t\r")]
        # A first line that opens a bracket may be the start of an array.
        count = None if not filled or filled[0].lstrip(b" \t\r").startswith(b"[") else len(filled)
    suffix = draw(st.sampled_from([".jsonl", ".json", ".jsonl.gz"]))
    if suffix.endswith(".gz"):
        content = gzip.compress(content)
    if draw(st.integers(0, 4)) == 0:
        at = draw(st.integers(0, len(content)))
        content, count = content[:at] + draw(st.binary(max_size=2)) + content[at + draw(st.integers(0, 40)) :], None
    return "p" + suffix, content, count


mappings = st.sampled_from([None, None, None, None, None, {"prompt": "chosen", "chosen": "prompt"}, {"id": "tools"},
                            {"question": "prompt"}, {"\ud800": "system"}])  # fmt: skip
limits = st.fixed_dictionaries({"data_errors": st.sampled_from(["skip", "skip", "stop"])}, optional={
    "max_length": st.integers(2, 40), "max_samples": st.integers(1, 3),
    "truncation_mode": st.sampled_from(["keep_end", "keep_start"]),
    # One that contradicts max_length would refuse the settings before any file is read.
    "max_prompt_length": st.just(1) | st.integers(1, 20),
})  # fmt: skip


def check_account(loaded, count, chosen):
    """Every row was used or dropped for a reason, with a place; every pair has something to learn from."""
    counts = loaded.counts
    dropped = {key: number for key, number in counts.items() if key.startswith("dropped/")}
    assert counts["read"] == counts["used"] + sum(dropped.values())
    assert counts["used"] == len(loaded.pairs) > 0
    assert all(loaded.first_lines[key] for key in dropped)
    assert json.dumps([counts, loaded.first_lines]).isascii()
    if count is not None:
        assert counts["read"] == min(count, chosen.get("max_samples") or count)
    for pair in loaded.pairs:
        sizes = [len(ids) for ids in (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids)]
        assert min(sizes) >= 1
        assert pair.shared_start < max(sizes[1:])
        assert sizes[0] + max(sizes[1:]) <= chosen.get("max_length", 10**9)
        assert re.search(r":\d+( \(row \d+\))?$", pair.source)


@settings(max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(file=files(), tokenizer=st.sampled_from(TOKENIZERS), chosen=limits, mapping=mappings)
def load_anything(file, tokenizer, chosen, mapping):
    name, content, count = file
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        try:
            config = StochDPOConfig(dataset_name=str(path), column_mapping=mapping, dataset_num_proc=1, **chosen)
            loaded = load_pairs(config, tokenizer, progress=False)
        except StochDPOError as error:
            str(error).encode()
            OUTCOMES.append("error")
        else:
            check_account(loaded, count, chosen)
            OUTCOMES.append("pairs")


OUTCOMES = []


@pytest.mark.timeout(SECONDS + 120)
def test_anything_ends_in_an_error_of_ours_or_a_whole_account():
    end = time.monotonic() + SECONDS
    while not OUTCOMES or time.monotonic() < end:
        load_anything()
    # Files that are all refused would show nothing.
    assert OUTCOMES.count("pairs") > len(OUTCOMES) / 20
