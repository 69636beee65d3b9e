"""From a canonical row to token ids: chat template, tokenizer, and where the responses begin.

Floor: data. Entry: `PairRenderer.render`.

The whole text of each side is tokenised once, so the ids are those that the model meets when it reads it, and
the template's default system turn or begin token occurs once. The responses begin after the longest run of
tokens that the prompt's rendering and both whole renderings share: where a generation header opens what the
whole text lacks, or the last prompt character melts into a response's first token, the boundary moves left,
for both.

What ends a response: for messages whatever the template writes after the last assistant turn, a trailing
newline included; for strings the tokenizer's end token, unless the text ends with it.

A control token that is written out in a text, such as <|im_end|>, becomes that token, as it does at inference: it is
kept, not escaped, and the row is noted. Only what follows the prompt's rendering is scored all the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from ds_stochdpo.data.layouts import CanonicalRow, common_prefix_length
from ds_stochdpo.data.messages import Message, function_name
from ds_stochdpo.data.tally import BadRowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTROL_TOKENS = "control tokens in text"
REPEATS_PROMPT = "response repeats prompt"
NO_TURN = "turns that the template does not render"
NO_TOOLS = "tools that the template does not render"
DROPS_CALLS = "template drops tool calls"
USE_TOOLS = "use a template with tool support"
TOOL_ROLES = ("tool", "function", "ipython")
# A template is a program that runs on the row's data, so it may fail in any of these ways.
TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError,
                   RecursionError)  # fmt: skip
NOTHING = r"(?!)"
Encoded = tuple[list[int], list[int], list[int], list[str]]


@dataclass(frozen=True, eq=False)
class RenderedPair:
    """Token ids of one pair before truncation.

    Attributes:
        prompt_ids: int64 [P], P >= 1.
        chosen_ids: int64 [T_w], T_w >= 1.
        rejected_ids: int64 [T_l], T_l >= 1, not equal to `chosen_ids`.
        notes: What is worth counting about the row, each under the same words for every such row.
    """

    prompt_ids: np.ndarray
    chosen_ids: np.ndarray
    rejected_ids: np.ndarray
    notes: tuple[str, ...] = ()


class PairRenderer:
    """Renders rows with one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        bos = tokenizer.bos_token_id
        # A begin token that is only defined (GPT-2, ChatML models) must not be invented; one that the
        # tokenizer itself writes before any text must be there.
        self._bos_ids = [bos] if bos is not None and list(tokenizer("")["input_ids"][:1]) == [bos] else []
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._control_token = re.compile("|".join(map(re.escape, sorted(special))) or NOTHING)

    def render(self, row: CanonicalRow) -> RenderedPair:
        """Tokenise one row.

        Args:
            row: Strings are taken as they are; messages go through the chat template.

        Raises:
            BadRowError: If the prompt or a response has no token, both responses have the same ones, there are
                messages but no chat template, or the template refuses the row, rewrites its prompt or drops its tool
                calls.
        """
        if isinstance(row.prompt, str):
            prompt, chosen, rejected, notes = self._encode_strings(row)
        else:
            prompt, chosen, rejected, notes = self._encode_messages(row)
        boundary = common_prefix_length(prompt, chosen, rejected)
        if boundary < len(prompt) and not isinstance(row.prompt, str):
            self._check_prompt_kept(row)
        if boundary == 0:
            raise BadRowError("prompt is empty", "no token before the responses")
        return _split(chosen, rejected, boundary, notes)

    def _encode_strings(self, row: CanonicalRow) -> Encoded:
        prompt, sides = str(row.prompt), (str(row.chosen), str(row.rejected))
        whole = [self._encode_whole(prompt, side) for side in sides]
        # An end token that is written out at the end of a response does what it says.
        bare = [side.removesuffix(self.tokenizer.eos_token or "") for side in sides]
        notes = self._control_notes((prompt, *bare))
        if prompt.strip() and all(side.startswith(prompt) for side in sides):
            notes.append(REPEATS_PROMPT)
        return self._encode(prompt), whole[0], whole[1], notes

    def _encode(self, text: str) -> list[int]:
        ids = list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        return ids if ids[:1] == self._bos_ids else self._bos_ids + ids

    def _encode_whole(self, prompt: str, response: str) -> list[int]:
        ids = self._encode(prompt + response)
        eos, eos_id = self.tokenizer.eos_token, self.tokenizer.eos_token_id
        if eos_id is None or (response.endswith(eos) and ids[-1:] == [eos_id]):
            return ids
        return [*ids, eos_id]

    def _encode_messages(self, row: CanonicalRow) -> Encoded:
        if not self.tokenizer.chat_template:
            raise BadRowError(
                "no chat template",
                "the row holds messages, but the tokenizer has no chat template; use a model with one, or give prompt, "
                "chosen and rejected as strings",
            )
        prompt, chosen, rejected = _conversations(row)
        ids = [self._template_ids(prompt, row, add_generation_prompt=True)]
        ids += [self._template_ids(side, row) for side in (chosen, rejected)]
        notes = self._control_notes(message["content"] for message in (*chosen, *rejected[len(prompt) :]))
        asked, answers = prompt[-1]["content"], (chosen[len(prompt)]["content"], rejected[len(prompt)]["content"])
        if asked.strip() and all(answer.startswith(asked) for answer in answers):
            notes.append(REPEATS_PROMPT)
        return ids[0], ids[1], ids[2], [*notes, *self._check_turns(row), *self._check_tools(row)]

    def _control_notes(self, texts: Iterable[str]) -> list[str]:
        return [CONTROL_TOKENS] if any(map(self._control_token.search, texts)) else []

    def _template_ids(
        self, messages: list[Message], row: CanonicalRow, *, add_generation_prompt: bool = False
    ) -> list[int]:
        ids = self._template(
            messages,
            row,
            add_generation_prompt=add_generation_prompt,
            return_dict=False,
            tokenizer_kwargs={"verbose": False},
        )
        # Tokenizers with their own apply_chat_template may return the dictionary all the same.
        return list(ids["input_ids"] if isinstance(ids, Mapping) else ids)

    def _template(self, messages: list[Message], row: CanonicalRow, **options: Any) -> Any:
        arguments = {"tools": row.tools, **(row.template_options or {}), **options}
        try:
            return self.tokenizer.apply_chat_template(messages, **arguments)
        except TEMPLATE_ERRORS as error:
            found = str(error) or type(error).__name__
        raise BadRowError("template refuses the row", found)

    def _check_prompt_kept(self, row: CanonicalRow) -> None:
        """The prompt's last message must lie before the boundary, or prompt text would be scored."""
        prompt, chosen, rejected = _conversations(row)
        texts = [self._template(prompt, row, tokenize=False, add_generation_prompt=True)]
        texts += [self._template(side, row, tokenize=False) for side in (chosen, rejected)]
        if prompt[-1]["content"].strip() not in texts[0][: common_prefix_length(*texts)]:
            raise BadRowError("template rewrites the prompt", "the last prompt message changes once a response follows")

    def _check_turns(self, row: CanonicalRow) -> list[str]:
        """Find turns that a template leaves out without a word: once more, with a mark in place of every content."""
        notes = []
        _, chosen, _ = _conversations(row)
        marks = [f"turn{i}x" if message["content"].strip() else "" for i, message in enumerate(chosen)]
        marked = [{**message, "content": mark} for message, mark in zip(chosen, marks, strict=True)]
        text = self._text_if_any(marked, row)
        for message, mark in zip(chosen, marks, strict=True):
            if text is None or mark in text:
                continue
            if message["role"] in TOOL_ROLES:
                raise BadRowError(DROPS_CALLS, "the chat template drops what a tool returns; " + USE_TOOLS)
            notes = [NO_TURN]
        return notes

    def _check_tools(self, row: CanonicalRow) -> list[str]:
        """A template without tool support leaves calls and schemas out without a word."""
        _, *sides = _conversations(row)
        for side in sides:
            names = [function_name(call) for message in side for call in message.get("tool_calls", ())]
            if not names:
                continue
            text = self._template(side, row, tokenize=False)
            bare = [{key: item for key, item in message.items() if key != "tool_calls"} for message in side]
            missing = [name for name in names if name not in text]
            # A name may be written elsewhere, too.
            if missing or self._text_if_any(bare, row) == text:
                raise BadRowError(DROPS_CALLS, f"the chat template drops tool_calls of {', '.join(names)}; {USE_TOOLS}")
        if row.tools:
            text = self._template(sides[0], row, tokenize=False)
            if self._text_if_any(sides[0], replace(row, tools=None)) == text:
                return [NO_TOOLS]
        return []

    def _text_if_any(self, messages: list[Message], row: CanonicalRow) -> str | None:
        """What the template writes; None where it refuses."""
        try:
            return str(self._template(messages, row, tokenize=False))
        except BadRowError:
            return None


def _split(chosen: list[int], rejected: list[int], boundary: int, notes: Iterable[str]) -> RenderedPair:
    for field, ids in (("chosen", chosen), ("rejected", rejected)):
        if len(ids) == boundary:
            raise BadRowError("no response tokens", f"{field} adds no token to the prompt")
    if chosen == rejected:
        raise BadRowError("identical responses", "chosen and rejected have the same tokens")
    parts = (chosen[:boundary], chosen[boundary:], rejected[boundary:])
    prompt_ids, chosen_ids, rejected_ids = (np.array(part, dtype=np.int64) for part in parts)
    return RenderedPair(prompt_ids, chosen_ids, rejected_ids, tuple(notes))


def _conversations(row: CanonicalRow) -> tuple[list[Message], list[Message], list[Message]]:
    assert isinstance(row.prompt, list)
    assert isinstance(row.chosen, list)
    assert isinstance(row.rejected, list)
    return row.prompt, row.prompt + row.chosen, row.prompt + row.rejected
