"""What happens to a row with each fault is what the table says, in both modes; and the help text says it too."""

import gzip
import json

import pytest

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.data import load_pairs
from ds_stochdpo.errors import ROW_FAULTS, DataError
from tests.data.texts import assistant, gpt, ids_of, user
from tests.tiny import CHAT, pair_rows, tiny_tokenizer

CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "wx", "arguments": "{}"}}]}
MESSAGES = {"prompt": [user("Capital?")], "chosen": [assistant("Seoul")], "rejected": [assistant("Madrid")]}
LONG = " egg" * 200


def strings(prompt, chosen, rejected):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


# One row, or one line, for each fault.
FAULTY = {
    "not text": strings("x", None, "no"),
    "no response tokens": strings("x", "", "no"),
    "prompt is empty": strings("", "yes", "no"),
    "identical responses": strings("x", "yes", "yes"),
    "identical after truncation": strings("x", LONG + "yes", LONG + "no"),
    "no assistant turn": {"chosen": "yes", "rejected": "no"},
    "histories differ": MESSAGES | {"chosen": [assistant("a"), user("b"), assistant("c")]},
    "unknown role": {"conversations": [{"from": "bing", "value": "x"}], "chosen": gpt("a"), "rejected": gpt("b")},
    "not a function call": MESSAGES | {"prompt": [user("x"), {"role": "assistant", "tool_calls": [{}]}]},
    "tools are not JSON": MESSAGES | {"tools": "{"},
    "bad template arguments": MESSAGES | {"chat_template_kwargs": "x"},
    "template refuses the row": MESSAGES,
    "template rewrites the prompt": MESSAGES,
    "not JSON": b'{"prompt": ',
    "not UTF-8": b'{"prompt": "\xff"}',
    "file cut off": gzip.compress(b"")[:-8],
    "not an object": "x",
    "responses of two kinds": MESSAGES | {"rejected": "Madrid"},
    "not an assistant message": MESSAGES | {"rejected": [user("go away")]},
    "template drops tool calls": MESSAGES | {"prompt": [user("x"), CALL, {"role": "tool", "content": "rain"}]},
    "no known layout": {"query": "x", "answer": "yes"},
    "not a preference pair": {"messages": [user("x"), assistant("y")], "label": True},
    "no chat template": MESSAGES,
}
TOKENIZERS = {
    "no response tokens": {"eos": None},
    "template refuses the row": {"template": "{{ messages[0].nothing.at_all }}"},
    "template rewrites the prompt": {"template": CHAT.replace("m['content']", "m.content if loop.last else 7")},
    "no chat template": {"template": None},
}


@pytest.fixture
def outcome(tmp_path):
    """Load good rows with one faulty row among or before them, and give the counts, or the message of the error."""

    def run(reason, data_errors, lines_before):
        faulty = FAULTY[reason]
        faulty = faulty if isinstance(faulty, bytes) else json.dumps(faulty).encode() + b"\n"
        good = [json.dumps(row).encode() + b"\n" for row in pair_rows(3)]
        if reason == "file cut off":
            path = tmp_path / "rows.jsonl.gz"
            path.write_bytes(gzip.compress(b"".join(good)) + faulty)
        else:
            path = tmp_path / "rows.jsonl"
            good.insert(lines_before, faulty.removesuffix(b"\n") + b"\n")
            path.write_bytes(b"".join(good))
        config = StochDPOConfig(dataset_name=str(path), data_errors=data_errors)
        try:
            return load_pairs(config, tiny_tokenizer(**TOKENIZERS.get(reason, {})), context_length=128)
        except DataError as error:
            return str(error)

    return run


def test_there_is_a_row_for_each_fault():
    assert set(FAULTY) == set(ROW_FAULTS)


@pytest.mark.parametrize("data_errors", ["stop", "skip"])
@pytest.mark.parametrize("reason", ROW_FAULTS)
def test_a_faulty_row_among_others_meets_its_policy(outcome, load, reason, data_errors):
    policy, _ = ROW_FAULTS[reason]
    loaded = outcome(reason, data_errors, lines_before=1)
    line = 4 if reason == "file cut off" else 2
    if policy == "stop" or (policy == "data_errors" and data_errors == "stop"):
        assert f"rows.jsonl{'.gz' * (line == 4)}:{line}: " in loaded
        assert ("data_errors: skip" in loaded) == (policy == "data_errors")
        return
    assert loaded.counts == {"read": 4, "used": 3, f"dropped/{reason}": 1}
    assert [place.split(":")[-1] for place in loaded.first_lines[f"dropped/{reason}"]] == [str(line)]
    assert ids_of(loaded) == ids_of(load(pair_rows(3), tiny_tokenizer(**TOKENIZERS.get(reason, {}))))


@pytest.mark.parametrize("reason", [reason for reason in ROW_FAULTS if reason != "file cut off"])
def test_a_faulty_row_at_the_start_meets_its_policy(outcome, reason):
    policy, _ = ROW_FAULTS[reason]
    loaded = outcome(reason, "skip", lines_before=0)
    if policy in ("stop", "first row"):
        assert "rows.jsonl:1: " in loaded
    else:
        assert loaded.counts == {"read": 4, "used": 3, f"dropped/{reason}": 1}


def test_the_help_text_tells_the_policy_of_every_fault():
    text = StochDPOConfig.__dataclass_fields__["data_errors"].metadata["help"]
    headings = {"data_errors": "Broken rows: ", "drop": "dropped and counted are: ", "stop": "Always an error: ",
                "first row": "else dropped and counted: "}  # fmt: skip
    for reason, (policy, meaning) in ROW_FAULTS.items():
        sentence = text.split(headings[policy])[1].split(". ")[0]
        assert reason in sentence.replace(", and", ",").split(", "), reason
        assert meaning
