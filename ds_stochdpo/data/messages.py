"""Messages and tools in the spellings people use, and the check that text is text.

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
# How files write that a message calls nothing.
_NO_CALLS: dict[str, tuple[Any, ...]] = {"tool_calls": ([],), "function_call": ({}, "")}
# What a message says; other keys (weights, ids, dates) do not make two messages different.
_SAYING = ("role", "content", "tool_calls", "reasoning_content", "thinking")


def require_text(value: Any, field: str) -> str:
    """`value` if it is text that a tokenizer can take.

    Raises:
        BadRowError: If it is null, a number or an object (never converted), or holds half a surrogate pair.
    """
    if not isinstance(value, str):
        raise BadRowError("not text", f"{field} is {json_kind(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRowError("not text", f"{field} holds half a surrogate pair") from None
    return value


def read_messages(values: list[Any], field: str) -> list[Message]:
    """Messages as {role, content, ...}, whether given so or as {from, value}.

    Keys without a value are left out (columnar files fill them in), text parts are joined, and a function call of
    ShareGPT or of OpenAI's old form becomes a tool call.

    Args:
        values: The list as read.
        field: Column it came from, for messages.

    Raises:
        BadRowError: If an entry is no message, its content no text, or its calls have no name.
    """
    return [_read_message(value, f"{field}[{index}]") for index, value in enumerate(values)]


def same_message(first: Message, second: Message) -> bool:
    """Whether two messages say the same, whatever else is noted about them."""
    return all(first.get(key) == second.get(key) for key in _SAYING)


def read_tools(value: Any) -> list[Any] | None:
    """Tool schemas in OpenAI's form, given as a list or as its JSON text; None: there are none.

    Raises:
        BadRowError: If it is something else.
    """
    if isinstance(value, str) and value.strip():
        value = _loads(value, "tools are not JSON", "tools")
    if value in (None, "", [], {}) or (isinstance(value, str) and not value.strip()):
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadRowError("tools are not JSON", f"tools is {json_kind(value)}; it must be a list of objects")
    # ShareGPT files hold the bare function.
    return [{"type": "function", "function": tool} if _is_bare(tool) else tool for tool in value]


def function_name(call: Any) -> str:
    """Name of the function that a tool call or a tool schema is about; empty: it has none."""
    function = call.get("function", call) if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def _is_bare(tool: dict[str, Any]) -> bool:
    return "name" in tool and "function" not in tool


def _read_message(value: Any, field: str) -> Message:
    if not isinstance(value, dict):
        raise BadRowError("not text", f"{field} is {json_kind(value)}, not a message")
    if "role" not in value:
        return _read_sharegpt(value, field)
    message = {key: item for key, item in value.items() if item not in (None, *_NO_CALLS.get(key, ()))}
    role = require_text(value["role"], f"{field}.role")
    message["role"] = FROM_ROLES.get(role, role)
    if "function_call" in message:
        message.setdefault("tool_calls", [{"type": "function", "function": message.pop("function_call")}])
    if "tool_calls" in message:
        message["tool_calls"] = _read_calls(message["tool_calls"], field)
    message["content"] = _read_content(message, field)
    return message


def _read_sharegpt(value: dict[str, Any], field: str) -> Message:
    role = value.get("from")
    if not isinstance(role, str) or role not in FROM_ROLES:
        raise BadRowError("unknown role", f"{field} is from {str(role)[:40]!r}; known: {', '.join(FROM_ROLES)}")
    text = require_text(value.get("value"), f"{field}.value")
    if role != "function_call":
        return {"role": FROM_ROLES[role], "content": text}
    calls = _loads(text, "not a function call", field)
    calls = _read_calls(calls if isinstance(calls, list) else [calls], field)
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _read_calls(calls: Any, field: str) -> list[Any]:
    if not isinstance(calls, list) or not all(function_name(call) for call in calls):
        raise BadRowError("not a function call", f"{field} has a tool call without the name of its function")
    return [call if "function" in call else {"type": "function", "function": call} for call in calls]


def _read_content(message: Message, field: str) -> str:
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return ""
    if isinstance(content, list):
        return "".join(_part_text(part, field) for part in content)
    return require_text(content, f"{field}.content")


def _part_text(part: Any, field: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text":
        return require_text(part.get("text", part.get("value")), f"{field}.content")
    raise BadRowError("not text", f"{field}.content has a part that is not text")


def _loads(text: str, reason: str, field: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRowError(reason, f"{field}: {error}") from None


def json_kind(value: Any) -> str:
    """What a JSON value is, in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, str):
        return "a string"
    return "a list" if isinstance(value, list) else f"a {type(value).__name__}"
