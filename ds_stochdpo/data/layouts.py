"""The row layouts people have, each turned into one form.

Floor: data. Entry: `canonical_row`. The layout is decided row by row, from the columns and the types in them:

- plain: `prompt`, `chosen`, `rejected` strings, taken as they are, without chat template;
- conversational: `chosen` and `rejected` are messages, either what follows `prompt` or whole conversations
  (`chosen_messages` and `rejected_messages` in LLaMA-Factory v1 files). Whole conversations decide over a `prompt`
  string;
- ShareGPT: `conversations` of {from, value}, `chosen` and `rejected` one such message, `system`, `tools`;
- Alpaca: `instruction`, `input`, `chosen`, `rejected` strings, `system`, `history`; a user turn holds instruction and
  input with a blank line between them;
- transcript: no prompt; both strings end with the turn that differs, and the prompt ends after the last
  "Assistant:" that both share.

Messages that both sides share at the start are the prompt, given or not. What is left to score must be the
assistant's alone: a row that would train on what a user or a tool says is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ds_stochdpo.data.columns import column_list
from ds_stochdpo.data.messages import Message, json_kind, read_messages, read_tools, require_text, same_message
from ds_stochdpo.data.refusals import refusal
from ds_stochdpo.data.tally import BadRowError, BrokenRow

ASSISTANT_TAG = "\n\nAssistant:"
HUMAN_TAG = "\n\nHuman:"
PROMPT_COLUMNS = ("prompt", "conversations", "instruction")
HISTORIES_DIFFER = "histories differ"
# Arguments of `apply_chat_template` that are not the row's to choose.
_OWN_ARGUMENTS = frozenset({
    "conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message",
    "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs", "sanitize_control_tokens",
})  # fmt: skip

Side = str | list[Message]


@dataclass(frozen=True)
class CanonicalRow:
    """One preference row, whatever its layout was: all three parts strings, or all three lists of messages.

    Attributes:
        prompt: Text before the response, or its messages.
        chosen: Preferred response; messages are the assistant's alone.
        rejected: Other response, of the same kind.
        columns: Columns that were used; the others are ignored.
        tools: Tool schemas for the chat template.
        template_options: Further arguments of the chat template.
    """

    prompt: Side
    chosen: Side
    rejected: Side
    columns: frozenset[str]
    tools: list[Any] | None = None
    template_options: dict[str, Any] | None = None


def canonical_row(row: Any) -> CanonicalRow:
    """Recognise the layout of a row and convert it.

    Args:
        row: One JSON value as read, or what stands for a line that could not be read.

    Raises:
        BadRowError: If the row is unusable; whether that ends the run depends on the reason.
    """
    if isinstance(row, BrokenRow):
        raise BadRowError(row.reason, row.detail)
    if not isinstance(row, dict):
        raise BadRowError("not an object", f"the row is {json_kind(row)}; it must be an object with columns")
    names = _response_columns(row)
    chosen, rejected = (_read_side(row[name], name) for name in names)
    if isinstance(chosen, str) is not isinstance(rejected, str):
        kinds = ("a string", "messages") if isinstance(chosen, str) else ("messages", "a string")
        raise BadRowError(
            "responses of two kinds",
            f"{names[0]} is {kinds[0]} but {names[1]} is {kinds[1]}; both must be of one kind",
        )
    column = next((name for name in PROMPT_COLUMNS if row.get(name) is not None), "prompt")
    is_text = column == "prompt" and not isinstance(row.get("prompt"), list)
    if is_text and isinstance(chosen, str) and isinstance(rejected, str):
        return _from_strings(row, chosen, rejected, names)
    return _from_messages(row, column, _as_messages(chosen), _as_messages(rejected), names)


def _response_columns(row: dict[str, Any]) -> tuple[str, str]:
    pairs = (("chosen", "rejected"), ("chosen_messages", "rejected_messages"))
    # Where files of two layouts were joined, the columns of one are empty.
    filled = [names for names in pairs if all(row.get(name) is not None for name in names)]
    there = [names for names in pairs if all(name in row for name in names)]
    if not there:
        raise refusal(row)
    return (filled or there)[0]


def _read_side(value: Any, field: str) -> Side:
    if isinstance(value, dict) and ("role" in value or "from" in value):
        value = [value]
    if not isinstance(value, list):
        return require_text(value, field)
    messages = read_messages(value, field)
    if not messages:
        raise BadRowError("no response tokens", f"{field} is an empty list")
    if messages[-1]["role"] != "assistant":
        raise BadRowError(
            "not an assistant message",
            f"{field} must end with an assistant message (found: {messages[-1]['role']}); change its role",
        )
    return messages


def _from_strings(row: dict[str, Any], chosen: str, rejected: str, names: tuple[str, str]) -> CanonicalRow:
    if "prompt" in row:
        return CanonicalRow(require_text(row["prompt"], "prompt"), chosen, rejected, frozenset({*names, "prompt"}))
    return CanonicalRow(*split_transcripts(chosen, rejected, _columns_hint(row)), frozenset(names))


def _from_messages(
    row: dict[str, Any], column: str, chosen: list[Message], rejected: list[Message], names: tuple[str, str]
) -> CanonicalRow:
    used = {*names, column, "tools", "chat_template_kwargs"}
    prompt: list[Message] = []
    # Whole conversations hold the prompt themselves, better than a string does.
    if isinstance(row.get(column), list) or not (_is_whole(chosen) and _is_whole(rejected)):
        prompt, more = _read_prompt(row, column)
        used |= more
    return CanonicalRow(
        *split_conversations(prompt, chosen, rejected, _columns_hint(row)),
        frozenset(used & set(row)),
        read_tools(row.get("tools")),
        _template_options(row.get("chat_template_kwargs")),
    )


def _columns_hint(row: dict[str, Any]) -> str:
    """What to say where a prompt is missing and no column is known to hold it."""
    if any(column in row for column in PROMPT_COLUMNS):
        return ""
    return f"; columns found: {column_list(row)}; column_mapping can make one of them the prompt"


def _as_messages(side: Side) -> list[Message]:
    return _assistant(side) if isinstance(side, str) else side


def _assistant(text: str) -> list[Message]:
    return [{"role": "assistant", "content": text}]


def _is_whole(side: list[Message]) -> bool:
    return side[0]["role"] in ("system", "developer", "user")


def _read_prompt(row: dict[str, Any], column: str) -> tuple[list[Message], set[str]]:
    """Messages of the prompt, and the columns beside `column` that they come from."""
    value = row.get(column)
    if column == "instruction":
        return _alpaca_prompt(row), {"input", "history", "system"}
    if column == "conversations":
        if not isinstance(value, list):
            raise BadRowError("not text", f"conversations is {json_kind(value)}, not a list of messages")
        return [*_system_turn(row), *read_messages(value, column)], {"system"}
    if value is None:
        return [], set()
    if isinstance(value, list):
        return read_messages(value, column), set()
    return [{"role": "user", "content": require_text(value, column)}], set()


def _alpaca_prompt(row: dict[str, Any]) -> list[Message]:
    parts = [require_text(row[name], name) for name in ("instruction", "input") if row.get(name) is not None]
    messages = _system_turn(row)
    history = row.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise BadRowError("not text", "history is no list of [user, assistant] pairs")
    for asked, answered in history:
        messages.append({"role": "user", "content": require_text(asked, "history")})
        messages += _assistant(require_text(answered, "history"))
    return [*messages, {"role": "user", "content": "\n\n".join(part for part in parts if part)}]


def _system_turn(row: dict[str, Any]) -> list[Message]:
    system = row.get("system")
    return [{"role": "system", "content": require_text(system, "system")}] if system not in (None, "") else []


def _template_options(value: Any) -> dict[str, Any] | None:
    if value in (None, {}):
        return None
    if not isinstance(value, dict):
        raise BadRowError("bad template arguments", f"chat_template_kwargs is {json_kind(value)}, not an object")
    own = sorted(_OWN_ARGUMENTS & set(value))
    if own:
        raise BadRowError("bad template arguments", f"chat_template_kwargs sets {', '.join(own)}")
    # A columnar file gives every row the keys of all.
    return {key: item for key, item in value.items() if item is not None} or None


def split_conversations(
    prompt: list[Message], chosen: list[Message], rejected: list[Message], hint: str = ""
) -> tuple[list[Message], list[Message], list[Message]]:
    """Prompt and responses, the prompt being all that both sides share at the start but for their last turns.

    Args:
        prompt: Messages that come before both sides, as given; may be empty.
        chosen: What follows, or a whole conversation that repeats the prompt or its end.
        rejected: Likewise.
        hint: What to add where the prompt is missing.

    Raises:
        BadRowError: If there is no prompt, or more than the assistant's turns would be scored.
    """
    chosen, rejected = _strip_repeat(prompt, chosen), _strip_repeat(prompt, rejected)
    # A system turn opens a conversation: the sides are whole ones that say more than the prompt column.
    if chosen[0]["role"] == rejected[0]["role"] == "system":
        prompt = []
    chosen, rejected = [*prompt, *chosen], [*prompt, *rejected]
    shortest = min(len(chosen), len(rejected))
    shared = next((i for i in range(shortest) if not same_message(chosen[i], rejected[i])), shortest - 1)
    sides = {"chosen": chosen[shared:], "rejected": rejected[shared:]}
    for field, side in sides.items():
        other = next((message["role"] for message in side if message["role"] != "assistant"), None)
        if other is not None:
            raise BadRowError(HISTORIES_DIFFER, f"{field} has a turn of {other!r} after the point where the two part")
    if shared == 0:
        raise BadRowError("prompt is empty", "no message before the responses" + hint)
    return chosen[:shared], sides["chosen"], sides["rejected"]


def _strip_repeat(prompt: list[Message], side: list[Message]) -> list[Message]:
    for start in range(len(prompt)):
        repeated = prompt[start:]
        if len(side) > len(repeated) and all(map(same_message, side, repeated)):
            return side[len(repeated) :]
    return side


def split_transcripts(chosen: str, rejected: str, hint: str = "") -> tuple[str, str, str]:
    """Prompt and responses of two transcripts; prompt and response together are the transcript, letter by letter.

    Args:
        chosen: Transcript that ends with the preferred response.
        rejected: Transcript that ends with the other one.
        hint: What to add where the prompt is missing.

    Raises:
        BadRowError: If they share no assistant tag, or human turns lie after the last one that they share.
    """
    cut = chosen[: common_prefix_length(chosen, rejected)].rfind(ASSISTANT_TAG)
    if cut < 0:
        raise BadRowError(
            "no assistant turn", f"no prompt column, and the texts share no {ASSISTANT_TAG.strip()!r}{hint}"
        )
    end = cut + len(ASSISTANT_TAG)
    if HUMAN_TAG in chosen[end:] or HUMAN_TAG in rejected[end:]:
        raise BadRowError(HISTORIES_DIFFER, "the transcripts part before the last human turn")
    return chosen[:end], chosen[end:], rejected[end:]


def common_prefix_length(*sequences: Sequence[Any]) -> int:
    """Number of leading elements that all sequences share."""
    columns = enumerate(zip(*sequences, strict=False))
    return next((i for i, column in columns if column.count(column[0]) < len(column)), min(map(len, sequences)))
