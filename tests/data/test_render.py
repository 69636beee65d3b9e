"""Token ids: boundary, begin and end tokens, and what a template may do."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_stochdpo.data.layouts import CanonicalRow
from ds_stochdpo.data.render import PairRenderer
from ds_stochdpo.errors import DataError
from tests.data.texts import assistant, chatml, decoded, user
from tests.tiny import CHAT, tiny_tokenizer

BOS, EOS = 2, 1
STRINGS = {"prompt": "Name one colour.", "chosen": " Blue.", "rejected": " Another Green."}
MESSAGES = {"prompt": [user("Capital?")], "chosen": [assistant("Seoul")], "rejected": [assistant("Madrid")]}
DEFAULT_SYSTEM = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe nice.<|im_end|>\n{% endif %}" + CHAT
THINKING = CHAT.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
LAST_ONLY = (
    "{% for m in messages %}{% if loop.last %}{{ m.content }}{% else %}earlier {{ loop.index }}{% endif %}"
    "<|im_end|>{% endfor %}"
)
REFUSING = "{{ raise_exception('roles must alternate') }}"


@pytest.mark.parametrize("template", [CHAT, DEFAULT_SYSTEM, THINKING])
def test_prompt_and_response_are_the_whole_conversation(load, template):
    tok = tiny_tokenizer(template=template)
    pair = load([MESSAGES], tok).pairs[0]
    for ids, answer in ((pair.chosen_ids, "Seoul"), (pair.rejected_ids, "Madrid")):
        whole = tok.apply_chat_template([user("Capital?"), assistant(answer)], return_dict=False)
        assert [*pair.prompt_ids, *ids] == whole
        assert tok.decode(ids) == answer + "<|im_end|>\n"


def test_a_default_system_turn_occurs_once_and_in_the_prompt(load):
    tok = tiny_tokenizer(template=DEFAULT_SYSTEM)
    texts = decoded(tok, load([MESSAGES], tok).pairs[0])
    assert [text.count("Be nice.") for text in texts] == [1, 0, 0]


def test_ids_are_those_of_the_hand_written_template(load, tokenizer):
    pair = load([MESSAGES]).pairs[0]
    expected = tokenizer(chatml(user("Capital?"), assistant("Seoul")), add_special_tokens=False)["input_ids"]
    assert [*pair.prompt_ids, *pair.chosen_ids] == expected
    assert max(expected) < 347


@pytest.mark.parametrize("row", [STRINGS, MESSAGES])
def test_begin_token_occurs_once(load, row):
    tok = tiny_tokenizer(bos="<s>", template="{{ bos_token }}" + CHAT, adds_bos=True)
    pair = load([row], tok).pairs[0]
    assert pair.prompt_ids[0] == BOS
    assert sum((ids == BOS).sum() for ids in (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids)) == 1


@pytest.mark.parametrize("bos", [None, "<s>"])
def test_no_begin_token_is_invented(load, bos):
    pair = load([STRINGS], tiny_tokenizer(bos=bos)).pairs[0]
    assert BOS not in [*pair.prompt_ids, *pair.chosen_ids, *pair.rejected_ids]


def test_an_empty_prompt_trains_after_a_begin_token(load):
    pair = load([{**STRINGS, "prompt": ""}], tiny_tokenizer(bos="<s>", adds_bos=True)).pairs[0]
    assert pair.prompt_ids.tolist() == [BOS]


@pytest.mark.parametrize("pad", ["<pad>", "<|im_end|>", None])
def test_the_end_token_is_scored_whatever_the_pad_token(load, pad):
    pair = load([STRINGS], tiny_tokenizer(pad=pad)).pairs[0]
    assert [ids[-1] for ids in (pair.chosen_ids, pair.rejected_ids)] == [EOS, EOS]
    assert [(ids == EOS).sum() for ids in (pair.chosen_ids, pair.rejected_ids)] == [1, 1]


def test_an_end_token_in_the_text_is_not_doubled(load):
    ends = {**STRINGS, "chosen": " Blue.<|im_end|>"}
    assert load([ends]).pairs[0].chosen_ids.tolist() == load([STRINGS]).pairs[0].chosen_ids.tolist()


def test_an_empty_response_trains_on_the_end_token_alone(load, tokenizer):
    pair = load([{**STRINGS, "rejected": ""}]).pairs[0]
    assert pair.rejected_ids.tolist() == [EOS]
    prompt_that_ends = {"prompt": "Stop.<|im_end|>", "chosen": "", "rejected": "Stop."}
    assert load([prompt_that_ends]).pairs[0].chosen_ids.tolist() == [EOS]
    pair = load([{**MESSAGES, "rejected": [assistant("")]}]).pairs[0]
    assert tokenizer.decode(pair.rejected_ids) == "<|im_end|>\n"


def test_without_an_end_token_an_empty_response_is_dropped(load):
    loaded = load([STRINGS, {**STRINGS, "rejected": ""}], tiny_tokenizer(eos=None))
    assert loaded.counts == {"read": 2, "used": 1, "dropped/no response tokens": 1}


def test_a_token_across_the_boundary_goes_to_both_responses(load, tokenizer):
    # "colou" + "r" is one token of the whole text, so no whole token of the prompt's end is left.
    merged = {"prompt": "Name one colou", "chosen": "r.", "rejected": "rless."}
    prompt, chosen, rejected = decoded(tokenizer, load([merged]).pairs[0])
    assert (prompt + chosen, prompt + rejected) == (
        "Name one colour.<|im_end|>", "Name one colourless.<|im_end|>"
    )  # fmt: skip
    assert "Name one colou".startswith(prompt)
    assert prompt != "Name one colou"


def test_options_and_unused_columns(load, caplog):
    tok = tiny_tokenizer(template="{{ greeting }}" + CHAT)
    row = {**MESSAGES, "chat_template_kwargs": {"greeting": "Hey "}, "system": [user("be kind")], "id": 1}
    prompt, *_ = decoded(tok, load([row, {**row, "id": "a-7", "margin": float("nan")}], tok).pairs[0])
    assert prompt == "Hey " + chatml(user("Capital?"), header=True)
    notices = [record.getMessage() for record in caplog.records if "columns not used" in record.getMessage()]
    assert len(notices) == 1
    assert notices[0].endswith("system, id, margin")


@pytest.mark.parametrize(
    ("template", "reason"),
    [(LAST_ONLY, "template rewrites the prompt"), (REFUSING, "template refuses the row")],
)
def test_a_template_that_does_not_fit_a_row_drops_it(load, template, reason):
    loaded = load([STRINGS, MESSAGES], tiny_tokenizer(template=template))
    assert loaded.counts == {"read": 2, "used": 1, f"dropped/{reason}": 1}


def test_messages_without_a_template_are_refused(load):
    with pytest.raises(DataError, match=r"rows.jsonl:1: .*no chat template"):
        load([MESSAGES], tiny_tokenizer(template=None))


CALL = {"id": "t1", "type": "function", "function": {"name": "wx", "arguments": "{}"}}
CALLING = [
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "assistant", "content": "wx it is", "tool_calls": [CALL]},
    {"role": "assistant", "content": None, "function_call": CALL["function"]},
]
CALLS_ONLY = CHAT.replace(
    "{{ m['content'] }}", "{% if m.role != 'tool' %}{{ m.content }}{% endif %}{{ m.tool_calls or '' }}"
)


@pytest.mark.parametrize(
    ("template", "turn", "lost"),
    [(CHAT, turn, "tool_calls") for turn in CALLING]
    + [(CALLS_ONLY, CALLING[0], "what a tool returns"), (CHAT.replace("<|im_end|>\n", "{{ m.tool_calls|length }}"),
       CALLING[0], "tool_calls of wx")],
)  # fmt: skip
def test_a_template_that_hides_a_tool_call_or_its_result_is_refused(load, template, turn, lost):
    row = {**MESSAGES, "prompt": [user("weather? wx?"), turn, {"role": "tool", "content": "rain"}]}
    if "of wx" in lost:
        row["prompt"][0] = user("weather?")
    tok = tiny_tokenizer(template=template)
    with pytest.raises(DataError, match=rf"rows.jsonl:2: the chat template drops .*{lost}"):
        load([MESSAGES, row], tok)
    assert load([MESSAGES, row], tok, data_errors="skip").counts == {
        "read": 2, "used": 1, "dropped/template drops tool calls": 1
    }  # fmt: skip


def test_a_template_that_hides_a_turn_is_noticed(load):
    tok = tiny_tokenizer(template="{% for m in messages if m.role != 'system' %}" + CHAT.split("%}", 1)[1])
    silent = {**MESSAGES, "prompt": [{"role": "system", "content": "Be brief."}, *MESSAGES["prompt"]]}
    loaded = load([MESSAGES, silent], tok)
    assert loaded.counts["noted/turns that the template does not render"] == 1
    assert loaded.first_lines["noted/turns that the template does not render"][0].endswith("rows.jsonl:2")


def test_a_template_that_hides_tools_is_noticed_once(load, caplog):
    row = {**MESSAGES, "tools": [{"type": "function", "function": {"name": "wx"}}]}
    loaded = load([row, {**row, "chosen": [assistant("Busan")]}])
    assert loaded.counts == {"read": 2, "used": 2, "noted/tools that the template does not render": 2}
    assert sum("2 tools that the template does not" in record.getMessage() for record in caplog.records) == 1


SHARED_TOKENIZER = tiny_tokenizer()
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@settings(max_examples=60, deadline=None)
@given(prompt=texts.filter(bool), chosen=texts, rejected=texts)
def test_ids_decode_to_the_texts(prompt, chosen, rejected):
    if chosen == rejected:
        return
    renderer = PairRenderer(SHARED_TOKENIZER)
    messages = ([user(prompt)], [assistant(chosen)], [assistant(rejected)])
    pair = renderer.render(CanonicalRow(*messages, frozenset()))
    whole = [decoded(SHARED_TOKENIZER, pair)[0] + text for text in decoded(SHARED_TOKENIZER, pair)[1:]]
    assert whole == [chatml(user(prompt), assistant(answer)) for answer in (chosen, rejected)]
