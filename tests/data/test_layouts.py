"""Layouts: what each kind of row decodes to, and that two spellings of one pair give the same ids."""

import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ds_stochdpo.data.layouts import ASSISTANT_TAG, HUMAN_TAG, split_transcripts
from ds_stochdpo.errors import DataError
from tests.data.texts import assistant, chatml, decoded, gpt, human, ids_of, system, user

HH = "\n\nHuman: Is tea good?\n\nAssistant: Some say so.\n\nHuman: And you?\n\nAssistant:"
CAPITAL = [user("Capital?")]
SEOUL = [assistant("Seoul")]
MADRID = [assistant("Madrid")]
DIALOGUE = [system("Be brief."), user("Hi"), assistant("Hello."), user("Capital?")]
CALL = {"type": "function", "function": {"name": "wx", "arguments": "{}"}}
TOOL_CHAT = (
    "{% for t in tools or [] %}<tool>{{ t.function.name }}</tool>\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def pair(prompt, chosen, rejected):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


# Spellings of one pair; each must give the ids of the first.
SAME = {
    "response only": pair(CAPITAL, SEOUL, MADRID),
    "whole conversations, no prompt": {"chosen": CAPITAL + SEOUL, "rejected": CAPITAL + MADRID},
    "whole conversations, prompt messages": pair(CAPITAL, CAPITAL + SEOUL, CAPITAL + MADRID),
    "whole conversations, prompt string": pair("Capital?", CAPITAL + SEOUL, CAPITAL + MADRID),
    "conversations decide over the prompt string": pair("Other", CAPITAL + SEOUL, CAPITAL + MADRID),
    "prompt null": pair(None, CAPITAL + SEOUL, CAPITAL + MADRID),
    "prompt string, response messages": pair("Capital?", SEOUL, MADRID),
    "prompt messages, response strings": pair(CAPITAL, "Seoul", "Madrid"),
    "one message, not a list": pair(CAPITAL, SEOUL[0], MADRID[0]),
    "text parts": pair([user([{"type": "text", "text": "Capital?"}])], SEOUL, MADRID),
    "null keys of a columnar file": pair([{**CAPITAL[0], "name": None, "tool_calls": None}], SEOUL, MADRID),
    "empty lists of calls": pair(CAPITAL, [{**SEOUL[0], "tool_calls": []}], [{**MADRID[0], "function_call": {}}]),
    "sharegpt": {"conversations": [human("Capital?")], "chosen": gpt("Seoul"), "rejected": gpt("Madrid")},
    "sharegpt's names of roles": pair([{"role": "human", "content": "Capital?"}], {"role": "gpt", "content": "Seoul"},
                                      {"role": "gpt", "content": "Madrid"}),
    "sharegpt, whole": {
        "chosen": [human("Capital?"), gpt("Seoul")],
        "rejected": [human("Capital?"), gpt("Madrid")],
    },
    "sharegpt, null system and tools": {
        "conversations": [human("Capital?")], "chosen": gpt("Seoul"), "rejected": gpt("Madrid"),
        "system": "", "tools": None,
    },
    "columns of other layouts without a value": {
        "prompt": None, "conversations": [human("Capital?")], "chosen": gpt("Seoul"), "rejected": gpt("Madrid"),
        "instruction": None, "chosen_messages": None,
    },
    "messages columns beside empty ones": {
        "prompt": None, "chosen": None, "rejected": None, "chosen_messages": CAPITAL + SEOUL,
        "rejected_messages": CAPITAL + MADRID,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_spellings_of_one_message_pair(load, tokenizer, name):
    loaded = load([SAME[name]])
    expected = (chatml(*CAPITAL, header=True), "Seoul<|im_end|>\n", "Madrid<|im_end|>\n")
    assert decoded(tokenizer, loaded.pairs[0]) == expected
    assert loaded.counts == {"read": 1, "used": 1}


@pytest.mark.parametrize(
    "row",
    [
        pair(DIALOGUE, SEOUL, MADRID),
        {"chosen": DIALOGUE + SEOUL, "rejected": DIALOGUE + MADRID},
        pair(DIALOGUE[1:], DIALOGUE + SEOUL, DIALOGUE + MADRID),
        pair(DIALOGUE, DIALOGUE[1:] + SEOUL, DIALOGUE[1:] + MADRID),
        pair(DIALOGUE[:3], [DIALOGUE[3], *SEOUL], [DIALOGUE[3], *MADRID]),
        {
            "conversations": [human("Hi"), gpt("Hello."), human("Capital?")],
            "system": "Be brief.",
            "chosen": gpt("Seoul"),
            "rejected": gpt("Madrid"),
        },
    ],
)
def test_several_turns_with_a_system_turn(load, tokenizer, row):
    expected = (chatml(*DIALOGUE, header=True), "Seoul<|im_end|>\n", "Madrid<|im_end|>\n")
    assert decoded(tokenizer, load([row]).pairs[0]) == expected


def test_plain_strings(load, tokenizer):
    loaded = load([pair("Name one.", " Blue.", " Green!")])
    assert decoded(tokenizer, loaded.pairs[0]) == ("Name one.", " Blue.<|im_end|>", " Green!<|im_end|>")


def test_transcripts_are_cut_after_the_last_shared_tag(load, tokenizer):
    implicit = load([{"chosen": HH + " I think yes.", "rejected": HH + " I think no."}])
    expected = (HH, " I think yes.<|im_end|>", " I think no.<|im_end|>")
    assert decoded(tokenizer, implicit.pairs[0]) == expected
    explicit = load([pair(HH, " I think yes.", " I think no.")])
    assert ids_of(implicit) == ids_of(explicit)
    assert implicit.fingerprint == explicit.fingerprint


@pytest.mark.parametrize("as_text", [True, False])
def test_sharegpt_tools_and_calls_reach_the_template(load, as_text):
    from tests.tiny import tiny_tokenizer

    tok = tiny_tokenizer(template=TOOL_CHAT)
    tools = [{"name": "wx", "description": "", "parameters": {}}]
    row = {
        "conversations": [
            human("weather?"),
            {"from": "function_call", "value": '{"name": "wx", "arguments": {}}'},
            {"from": "observation", "value": "rain"},
        ],
        "tools": json.dumps(tools) if as_text else tools,
        "chosen": gpt("It rains."),
        "rejected": gpt("Sunny."),
    }
    prompt, chosen, rejected = decoded(tok, load([row], tok).pairs[0])
    assert prompt == "<tool>wx</tool>\n" + chatml(
        user("weather?"), assistant("<call>wx</call>"), {"role": "tool", "content": "rain"}, header=True
    )
    assert (chosen, rejected) == ("It rains.<|im_end|>\n", "Sunny.<|im_end|>\n")


# Turns that both sides share belong to the prompt, however they are given.
LATER = [user("Sure?"), assistant("Yes.")]


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": CAPITAL + SEOUL + LATER, "rejected": CAPITAL + SEOUL + [LATER[0], assistant("No.")]},
        pair(CAPITAL, SEOUL + LATER, [*SEOUL, LATER[0], assistant("No.")]),
        pair("Capital?", SEOUL + LATER, [*SEOUL, LATER[0], assistant("No.")]),
        pair(CAPITAL + SEOUL, LATER, [LATER[0], assistant("No.")]),
        # Weights and dates of a message are no part of what it says.
        pair(CAPITAL, [{**SEOUL[0], "weight": 0}, *LATER], [{**SEOUL[0], "weight": 1}, LATER[0], assistant("No.")]),
    ],
)
def test_only_what_differs_is_scored(load, tokenizer, row):
    prompt, chosen, rejected = decoded(tokenizer, load([row]).pairs[0])
    assert prompt == chatml(*CAPITAL, *SEOUL, LATER[0], header=True)
    assert (chosen, rejected) == ("Yes.<|im_end|>\n", "No.<|im_end|>\n")


ALPACA = {"instruction": "Name one.", "input": "A colour.", "chosen": "Blue.", "rejected": "Egg."}


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        (ALPACA, [user("Name one.\n\nA colour.")]),
        ({**ALPACA, "input": ""}, [user("Name one.")]),
        ({**ALPACA, "input": None, "system": None, "history": None}, [user("Name one.")]),
        (
            {**ALPACA, "input": "", "system": "Be brief.", "history": [["Hi", "Hello."]]},
            [system("Be brief."), user("Hi"), assistant("Hello."), user("Name one.")],
        ),
    ],
)
def test_alpaca_rows_become_a_conversation(load, tokenizer, row, turns):
    loaded = load([row])
    expected = (chatml(*turns, header=True), "Blue.<|im_end|>\n", "Egg.<|im_end|>\n")
    assert decoded(tokenizer, loaded.pairs[0]) == expected
    assert loaded.counts == {"read": 1, "used": 1}


def test_conversations_in_columns_of_their_own_and_parts(load, tokenizer):
    def parts(message):
        return {**message, "content": [{"type": "text", "value": message["content"]}], "loss_weight": 0.0}

    row = {
        "chosen_messages": [parts(m) for m in DIALOGUE + SEOUL],
        "rejected_messages": [parts(m) for m in DIALOGUE + MADRID],
    }
    expected = (chatml(*DIALOGUE, header=True), "Seoul<|im_end|>\n", "Madrid<|im_end|>\n")
    assert decoded(tokenizer, load([row]).pairs[0]) == expected


@settings(max_examples=100, deadline=None)
@given(history=st.text(max_size=20), chosen=st.text(max_size=20), rejected=st.text(max_size=20))
def test_no_letter_of_a_transcript_is_lost(history, chosen, rejected):
    texts = [f"\n\nHuman: {history}{ASSISTANT_TAG}{answer}" for answer in (chosen, rejected)]
    assume(not any(HUMAN_TAG in answer for answer in (chosen, rejected)))
    prompt, *sides = split_transcripts(*texts)
    assert [prompt + side for side in sides] == texts
    assert prompt.endswith(ASSISTANT_TAG)


DROPPED = {
    "no tags": ({"chosen": "yes", "rejected": "no"}, "no assistant turn"),
    "one answer begins the other": (
        {"chosen": "The sky is", "rejected": "The sky is blue"}, "no assistant turn"
    ),
    "transcript goes on": (
        {"chosen": HH + " yes", "rejected": HH + " no\n\nHuman: why?\n\nAssistant: so"}, "histories differ"
    ),
    "conversation goes on": (
        {"chosen": CAPITAL + SEOUL, "rejected": CAPITAL + MADRID + [user("why?")] + SEOUL}, "histories differ"
    ),
    "conversation goes on after the prompt": (
        pair(CAPITAL, SEOUL, [*MADRID, user("why?"), *SEOUL]), "histories differ"
    ),
    "a tool speaks after the prompt": (
        pair([user("weather?")], [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "rain"},
             assistant("It rains.")], [assistant("Sunny.")]), "histories differ"
    ),
    "first turns differ": (
        {"chosen": CAPITAL + SEOUL, "rejected": [user("Town?"), *SEOUL]}, "histories differ"
    ),
    "system turns differ": (
        {"chosen": [system("a"), *SEOUL], "rejected": [system("b"), *SEOUL]}, "histories differ"
    ),
    "user turns differ after the prompt": (
        pair(DIALOGUE[:3], [user("a"), *SEOUL], [user("b"), *MADRID]), "histories differ"
    ),
    "no message before the responses": ({"chosen": SEOUL, "rejected": MADRID}, "prompt is empty"),
    "empty list as prompt": (pair([], SEOUL, MADRID), "prompt is empty"),
    "empty string as prompt": (pair("", "Hello.", "Go away."), "prompt is empty"),
    "empty list as response": (pair(CAPITAL, [], MADRID), "no response tokens"),
    "identical strings": (pair("Pick one.", "Red.", "Red."), "identical responses"),
    "identical messages": (pair(CAPITAL, SEOUL, SEOUL), "identical responses"),
    "identical conversations": (
        {"chosen": DIALOGUE + SEOUL, "rejected": DIALOGUE + SEOUL}, "identical responses"
    ),
    "null": (pair("x", None, "no"), "not text"),
    "null prompt": (pair(None, "yes", "no"), "not text"),
    "number": (pair("2+2?", 4, 5), "not text"),
    "boolean": (pair("2+2?", "4", False), "not text"),
    "object": (pair("x", {"a": 1}, "no"), "not text"),
    "object as prompt": (pair({"answer": "x"}, "yes", "no"), "not text"),
    "list of strings": (pair("x", ["yes"], ["no"]), "not text"),
    "null content": (pair([user(None)], SEOUL, MADRID), "not text"),
    "object as content": (pair([user({"answer": "x"})], SEOUL, MADRID), "not text"),
    "image part": (pair([user([{"type": "image"}])], SEOUL, MADRID), "not text"),
    "half a surrogate pair": (pair("x", "\ud83d", "no"), "not text"),
    "history of single turns": ({**ALPACA, "history": ["Hi", "Hello."]}, "not text"),
    "unknown sharegpt role": (
        {"conversations": [{"from": "bing", "value": "x"}], "chosen": gpt("a"), "rejected": gpt("b")},
        "unknown role",
    ),
    "call that is no JSON": (
        {"conversations": [{"from": "function_call", "value": "x"}], "chosen": gpt("a"),
         "rejected": gpt("b")},
        "not a function call",
    ),
    "call without a name": (
        pair([user("x"), {"role": "assistant", "tool_calls": [{"id": "t1"}]}], SEOUL, MADRID), "not a function call"
    ),
    "calls that are no list": (
        pair([user("x"), {"role": "assistant", "content": "y", "tool_calls": 3}], SEOUL, MADRID),
        "not a function call",
    ),
    "tools that are no list": (pair(CAPITAL, SEOUL, MADRID) | {"tools": 7}, "tools are not JSON"),
    "template arguments that are ours": (
        pair(CAPITAL, SEOUL, MADRID) | {"chat_template_kwargs": {"tokenize": False}}, "bad template arguments"
    ),
    "column missing in one row": ({"prompt": "x", "chosen": "yes"}, "no known layout"),
}  # fmt: skip


@pytest.mark.parametrize("name", DROPPED)
def test_a_bad_row_is_dropped_counted_and_named(load, name):
    row, reason = DROPPED[name]
    good = pair(CAPITAL, SEOUL, MADRID), pair("Name one.", " Blue.", " Green!")
    loaded = load([good[0], row, good[1]])
    assert loaded.counts == {"read": 3, "used": 2, f"dropped/{reason}": 1}
    assert [line.rsplit("/", 1)[1] for line in loaded.first_lines[f"dropped/{reason}"]] == ["rows.jsonl:2"]
    assert [p.pair_id for p in loaded.pairs] == [0, 2]
    assert ids_of(loaded) == ids_of(load(good))


UNPAIRED, RATED = r"rows.jsonl:1: this is unpaired data \(KTO layout\)", "rows.jsonl:1: this is a rated pair: "
REFUSED = {
    "another tool's columns": (
        {"query": "Name a fruit.", "response": "Pear.", "rejected_response": "Brick."},
        r"rows.jsonl:1: no known layout .*: query, response, rejected_response\. Accepted: prompt, chosen, rejected"
        r".*column_mapping",
    ),
    "unpaired messages": ({"messages": CAPITAL + SEOUL, "label": True}, UNPAIRED),
    "unpaired completions": ({"prompt": "x", "completion": "y", "label": False}, UNPAIRED),
    "unpaired alpaca": ({"instruction": "x", "input": "", "output": "y", "kto_tag": True}, UNPAIRED),
    "votes": (
        {"instruction": "x", "input": "", "response1": "a", "response2": "b", "annotator1": 2, "annotator2": 2},
        RATED + "response1 and response2",
    ),
    "a label": ({"input": "x", "output_1": "a", "output_2": "b", "label": 1}, RATED + "output_1 .*label"),
    "answers of models": (
        {"prompt": "x", "completions": [{"model": "m", "completion": "a"}]}, "completions is a list of responses"
    ),
    "supervised": ({"messages": CAPITAL + SEOUL}, r"no known layout .*\(supervised data, .* in messages\?\)"),
    "no prompt among the columns": (
        {"question": "x", "chosen": "a", "rejected": "b"}, r"0 of 2 .*found: question, chosen, rejected; column_mapping"
    ),
    "no prompt among the columns, messages": (
        {"messages": CAPITAL, "chosen": SEOUL, "rejected": MADRID}, r"0 of 2 .*found: messages, .*column_mapping"
    ),
    "one column missing": ({"prompt": "x", "chosen": "y"}, "no known layout .*: prompt, chosen. Accepted"),
    "no columns": ({}, "columns found: none"),
    "user at the end": (
        pair(CAPITAL, SEOUL, [user("go away")]),
        r"rows.jsonl:1: rejected must end with an assistant .*user",
    ),
    "two kinds": (pair(CAPITAL, SEOUL, "Madrid"), "rows.jsonl:1: chosen is messages but rejected is a string"),
    "not an object": (7, "rows.jsonl:1: the row is a number; it must be an object"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_of_the_wrong_kind_is_refused_at_its_line(load, name):
    row, message = REFUSED[name]
    with pytest.raises(DataError, match=message):
        load([row, row])


def test_rows_of_two_kinds_may_share_a_file(load, tokenizer):
    loaded = load([pair("Name one.", " Blue.", " Green!"), pair(CAPITAL, SEOUL, MADRID)])
    assert decoded(tokenizer, loaded.pairs[0])[0] == "Name one."
    assert decoded(tokenizer, loaded.pairs[1])[0] == chatml(*CAPITAL, header=True)
