"""What is said about rows that hold no preference pair.

Floor: data. Entry: `refusal`.
"""

from __future__ import annotations

import re
from typing import Any

from ds_stochdpo.data.columns import column_list
from ds_stochdpo.data.tally import BadRowError

ACCEPTED_LAYOUTS = (
    "prompt, chosen, rejected (strings or messages)",
    "chosen, rejected (whole conversations, or transcripts with 'Human:' and 'Assistant:' turns)",
    "conversations, chosen, rejected (ShareGPT; system and tools optional)",
    "instruction, chosen, rejected (Alpaca; input, history and system optional)",
    "chosen_messages, rejected_messages (LLaMA-Factory v1)",
)
_LABELS = ("label", "kto_tag")
_ONE_RESPONSE = ("messages", "conversations", "completion", "response", "output", "text")
_RATED_LISTS = ("completions", "responses", "outputs", "answers", "generations")
_NUMBERED = re.compile(r"(.*?(?:response|output|answer|completion|text|reply|ref|model).*?)_?([0-9AaBb])$")


def refusal(row: dict[str, Any]) -> BadRowError:
    """The error for a row without both a chosen and a rejected column, by the name of its layout if that is known."""
    columns = f"columns found: {column_list(row)}"
    found = _name_layout(row)
    if found:
        return BadRowError("not a preference pair", f"{found}; {columns}")
    single = next((name for name in _ONE_RESPONSE if name in row), None)
    looks = f" (supervised data, with one response a row in {single}?)" if single and not _has_other(row) else ""
    return BadRowError(
        "no known layout",
        f"no known layout has these columns{looks}; {columns}. Accepted: {'; '.join(ACCEPTED_LAYOUTS)}. Columns of "
        "other names can be renamed by column_mapping: question=prompt,good=chosen,bad=rejected",
    )


def _has_other(row: dict[str, Any]) -> bool:
    return any(word in name.lower() for name in row for word in ("reject", "chosen", "prefer", "worse", "bad", "lose"))


def _name_layout(row: dict[str, Any]) -> str | None:
    single = next((name for name in _ONE_RESPONSE if name in row), None)
    label = next((name for name in _LABELS if name in row), None)
    if single and label:
        return f"this is unpaired data (KTO layout): one response ({single}) and a {label} a row, not two to compare"
    numbered = _numbered_responses(list(row))
    if numbered:
        votes = f" (is that in {label}?)" if label else ""
        return (
            f"this is a rated pair: {' and '.join(numbered)} are two responses, and no column says which is preferred"
            f"{votes}; write the better one to chosen and the other one to rejected"
        )
    several = next((name for name in _RATED_LISTS if isinstance(row.get(name), list)), None)
    if several:
        return (
            f"{several} is a list of responses without a preference; write one that is better to chosen and one that "
            "is worse to rejected"
        )
    return None


def _numbered_responses(names: list[str]) -> list[str]:
    stems: dict[str, list[str]] = {}
    for name in names:
        match = _NUMBERED.match(name)
        if match:
            stems.setdefault(match[1], []).append(name)
    return next((group for group in stems.values() if len(group) > 1), [])
