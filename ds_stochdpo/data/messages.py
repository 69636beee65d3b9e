"""Messages in the two spellings people use, and the check that text is text.

Floor: data. Entry: `read_messages`.
"""

from __future__ import annotations

import json
from typing import Any

from ds_stochdpo.data.tally import BadRowError

Message = dict[str, Any]

# ShareGPT's names; the right-hand side is what chat templates know.
FROM_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}


def require_text(value: Any, field: str) -> str:
    """`value` if it is text that a tokenizer can take.

    Raises:
        BadRowError: If it is null, a number or an object (never converted), or holds half a surrogate pair.
    """
    if not isinstance(value, str):
        raise BadRowError("not text", f"{field} is {_json_kind(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRowError("not text", f"{field} holds half a surrogate pair") from None
    return value


def read_messages(values: list[Any], field: str) -> list[Message]:
    """Messages as {role, content, ...}, whether given so or as {from, value}.

    Keys without a value are left out (columnar files fill them in), text parts are joined, and a ShareGPT
    function call becomes a tool call.

    Args:
        values: The list as read.
        field: Column it came from, for messages.

    Raises:
        BadRowError: If an entry is no message, or its content no text.
    """
    return [_read_message(value, f"{field}[{index}]") for index, value in enumerate(values)]


def _read_message(value: Any, field: str) -> Message:
    if not isinstance(value, dict):
        raise BadRowError("not text", f"{field} is {_json_kind(value)}, not a message")
    if "role" in value:
        message = {key: item for key, item in value.items() if item is not None}
        message["role"] = require_text(value["role"], f"{field}.role")
        message["content"] = _read_content(value, field)
        return message
    role = value.get("from")
    if role not in FROM_ROLES:
        raise BadRowError("unknown role", f"{field} is from {role!r}; known: {', '.join(FROM_ROLES)}")
    text = require_text(value.get("value"), f"{field}.value")
    if role == "function_call":
        return _function_call(text, field)
    return {"role": FROM_ROLES[role], "content": text}


def _read_content(value: dict[str, Any], field: str) -> str:
    content = value.get("content")
    if content is None and value.get("tool_calls"):
        return ""
    if isinstance(content, list):
        return "".join(_part_text(part, field) for part in content)
    return require_text(content, f"{field}.content")


def _part_text(part: Any, field: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text":
        return require_text(part.get("text", part.get("value")), f"{field}.content")
    raise BadRowError("not text", f"{field}.content has a part that is not text")


def _function_call(text: str, field: str) -> Message:
    try:
        calls = json.loads(text)
    except json.JSONDecodeError:
        raise BadRowError("not a function call", f"{field} is not JSON") from None
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise BadRowError("not a function call", f"{field} has no name")
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": call} for call in calls],
    }


def _json_kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, dict):
        return "an object"
    return "a list" if isinstance(value, list) else f"a {type(value).__name__}"
