"""The row layouts people have, each turned into one form.

Floor: data. Entry: `canonical_row`. The layout is decided row by row, from the columns and the types in them:

- plain: `prompt`, `chosen`, `rejected` strings;
- conversational: `chosen` and `rejected` are messages, either what follows `prompt` or whole conversations.
  Whole conversations decide over a `prompt` string: the prompt is then the messages that both share at the
  start;
- ShareGPT: `conversations` of {from, value}, `chosen` and `rejected` one such message, `system`, `tools`;
- transcript: no `prompt`; both strings end with the turn that differs, and the prompt ends after the last
  "Assistant:" that both share.

A prompt that is not given is never read from histories that differ: such a row would train on the user's
words.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ds_stochdpo.data.messages import Message, read_messages, require_text
from ds_stochdpo.data.tally import BadRowError
from ds_stochdpo.errors import DataError

ASSISTANT_TAG = "\n\nAssistant:"
HUMAN_TAG = "\n\nHuman:"
HISTORIES_DIFFER = "histories differ"

ACCEPTED_LAYOUTS = (
    "prompt, chosen, rejected (strings or messages)",
    "chosen, rejected (whole conversations, or transcripts with 'Human:' and 'Assistant:' turns)",
    "conversations, chosen, rejected (ShareGPT; system and tools optional)",
)

Side = str | list[Message]


@dataclass(frozen=True)
class CanonicalRow:
    """One preference row, whatever its layout was: all three parts strings, or all three lists of messages.

    Attributes:
        prompt: Text before the response, or its messages.
        chosen: Preferred response; messages end with the assistant's.
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


class UnknownLayoutError(DataError):
    """The columns of a row fit no layout."""


def canonical_row(row: Any, source: str) -> CanonicalRow:
    """Recognise the layout of a row and convert it.

    Args:
        row: One JSON value as read.
        source: "file:line" for messages.

    Raises:
        BadRowError: If this row alone is unusable.
        UnknownLayoutError: If columns are missing.
        DataError: If the row is built in a way that a whole file usually shares: unpaired data, responses
            of two kinds, a response that does not end with the assistant.
    """
    if not isinstance(row, dict):
        raise BadRowError("not an object", f"the row is a {type(row).__name__}")
    if "chosen" not in row or "rejected" not in row:
        raise _refusal(row, source)
    if "prompt" not in row and "conversations" in row:
        return _from_sharegpt(row, source)
    chosen, rejected = (_read_side(row[field], field, source) for field in ("chosen", "rejected"))
    prompt = row.get("prompt")
    if isinstance(chosen, str) and isinstance(rejected, str):
        if isinstance(prompt, list):
            chosen, rejected = _assistant(chosen), _assistant(rejected)
            return _conversational(row, _split_explicit(read_messages(prompt, "prompt"), chosen, rejected))
        if "prompt" in row:
            columns = frozenset({"prompt", "chosen", "rejected"})
            return CanonicalRow(require_text(prompt, "prompt"), chosen, rejected, columns)
        return CanonicalRow(*_split_transcript(chosen, rejected), frozenset({"chosen", "rejected"}))
    if isinstance(chosen, str) or isinstance(rejected, str):
        kinds = {True: "a string", False: "messages"}
        raise DataError(
            f"{source}: chosen is {kinds[isinstance(chosen, str)]} but rejected is "
            f"{kinds[isinstance(rejected, str)]}; both must be of one kind: change this row."
        )
    return _conversational(row, _split_conversation(prompt, chosen, rejected))


def _refusal(row: dict[str, Any], source: str) -> DataError:
    found = ", ".join(map(str, row)) or "none"
    if "label" in row and not {"messages", "completion", "conversations"}.isdisjoint(row):
        return DataError(
            f"{source}: this is unpaired data (KTO layout; columns {found}): one response and a label a row. "
            "Preference pairs need chosen and rejected in each row."
        )
    layouts = "; ".join(ACCEPTED_LAYOUTS)
    return UnknownLayoutError(
        f"{source}: no known layout has the columns {found}. Accepted: {layouts}. Rename the columns."
    )


def _read_side(value: Any, field: str, source: str) -> Side:
    if isinstance(value, dict) and ("role" in value or "from" in value):
        value = [value]
    if not isinstance(value, list):
        return require_text(value, field)
    messages = read_messages(value, field)
    if not messages:
        raise BadRowError("no response tokens", f"{field} is an empty list")
    if messages[-1]["role"] != "assistant":
        raise DataError(
            f"{source}: {field} must end with an assistant message (found: {messages[-1]['role']}); change its role."
        )
    return messages


def _assistant(text: str) -> list[Message]:
    return [{"role": "assistant", "content": text}]


Split = tuple[list[Message], list[Message], list[Message]]


def _conversational(row: dict[str, Any], split: Split) -> CanonicalRow:
    columns = {"prompt", "chosen", "rejected", "tools", "chat_template_kwargs"} & set(row)
    options = row.get("chat_template_kwargs")
    return CanonicalRow(*split, frozenset(columns), _read_tools(row.get("tools")), options or None)


def _from_sharegpt(row: dict[str, Any], source: str) -> CanonicalRow:
    if not isinstance(row["conversations"], list):
        raise BadRowError("not text", f"conversations is {type(row['conversations']).__name__}")
    prompt = read_messages(row["conversations"], "conversations")
    if row.get("system"):
        prompt = [{"role": "system", "content": require_text(row["system"], "system")}, *prompt]
    sides = [_read_side(row[field], field, source) for field in ("chosen", "rejected")]
    chosen, rejected = (_assistant(side) if isinstance(side, str) else side for side in sides)
    columns = {"conversations", "chosen", "rejected", "system", "tools"} & set(row)
    split = _split_explicit(prompt, chosen, rejected)
    return CanonicalRow(*split, frozenset(columns), _read_tools(row.get("tools")))


def _read_tools(value: Any) -> list[Any] | None:
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise BadRowError("tools are not JSON", str(error)) from None
    if not value:
        return None
    if not isinstance(value, list):
        raise BadRowError("tools are not JSON", f"tools is {type(value).__name__}, not a list")
    return [_openai_tool(tool) for tool in value]


def _openai_tool(tool: Any) -> Any:
    """Templates expect the OpenAI form; ShareGPT files hold the bare function."""
    is_bare = isinstance(tool, dict) and "name" in tool and "function" not in tool
    return {"type": "function", "function": tool} if is_bare else tool


def _split_conversation(prompt: Any, chosen: list[Message], rejected: list[Message]) -> Split:
    openers = ("system", "developer", "user")
    whole = chosen[0]["role"] in openers and rejected[0]["role"] in openers
    if prompt is None or (isinstance(prompt, str) and whole):
        return _split_implicit(chosen, rejected)
    if isinstance(prompt, list):
        return _split_explicit(read_messages(prompt, "prompt"), chosen, rejected)
    return _split_explicit([{"role": "user", "content": require_text(prompt, "prompt")}], chosen, rejected)


def _split_explicit(prompt: list[Message], chosen: list[Message], rejected: list[Message]) -> Split:
    """Prompt as given; responses that repeat it (or its end) lose the repetition."""
    chosen, rejected = _strip_repeat(prompt, chosen), _strip_repeat(prompt, rejected)
    # A system turn opens a conversation: the responses are whole ones that say more than the prompt column.
    if not prompt or chosen[0]["role"] == rejected[0]["role"] == "system":
        return _split_implicit(chosen, rejected)
    # Turns of others that both sides open with are context, not response.
    while chosen[0]["role"] != "assistant" and chosen[0] == rejected[0]:
        prompt, chosen, rejected = [*prompt, chosen[0]], chosen[1:], rejected[1:]
    for field, side in (("chosen", chosen), ("rejected", rejected)):
        if side[0]["role"] != "assistant":
            raise BadRowError(HISTORIES_DIFFER, f"after the prompt {field} goes on with a {side[0]['role']} turn")
    return prompt, chosen, rejected


def _strip_repeat(prompt: list[Message], side: list[Message]) -> list[Message]:
    for start in range(len(prompt)):
        repeated = prompt[start:]
        if len(side) > len(repeated) and side[: len(repeated)] == repeated:
            return side[len(repeated) :]
    return side


def _split_implicit(chosen: list[Message], rejected: list[Message]) -> Split:
    """Prompt = the messages both share at the start, ending where the assistant speaks next in both."""
    shortest = min(len(chosen), len(rejected))
    shared = next((i for i in range(shortest) if chosen[i] != rejected[i]), shortest - 1)
    while shared > 0 and not chosen[shared]["role"] == rejected[shared]["role"] == "assistant":
        shared -= 1
    prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    if chosen[0]["role"] == rejected[0]["role"] == "assistant" and not prompt:
        raise BadRowError("prompt is empty", "no message before the responses")
    if not prompt or any(message["role"] == "user" for message in (*chosen, *rejected)):
        raise BadRowError(HISTORIES_DIFFER, "the conversations part before the last user turn")
    return prompt, chosen, rejected


def _split_transcript(chosen: str, rejected: str) -> tuple[str, str, str]:
    cut = chosen[: common_prefix_length(chosen, rejected)].rfind(ASSISTANT_TAG)
    if cut < 0:
        raise BadRowError("no assistant turn", f"no prompt column, and the texts share no {ASSISTANT_TAG.strip()!r}")
    end = cut + len(ASSISTANT_TAG)
    if HUMAN_TAG in chosen[end:] or HUMAN_TAG in rejected[end:]:
        raise BadRowError(HISTORIES_DIFFER, "the transcripts part before the last human turn")
    return chosen[:end], chosen[end:], rejected[end:]


def common_prefix_length(*sequences: Sequence[Any]) -> int:
    """Number of leading elements that all sequences share."""
    columns = enumerate(zip(*sequences, strict=False))
    return next((i for i, column in columns if column.count(column[0]) < len(column)), min(map(len, sequences)))
