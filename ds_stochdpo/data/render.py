"""From a canonical row to token ids: chat template, tokenizer, and where the responses begin.

Floor: data. Entry: `PairRenderer.render`.

The whole text of each side is tokenised once, so the ids are those that the model meets when it reads it, and
the template's default system turn or begin token occurs once. The responses begin after the longest run of
tokens that the prompt's rendering and both whole renderings share: where a generation header opens what the
whole text lacks, or the last prompt character melts into a response's first token, the boundary moves left,
for both.

What ends a response: for messages whatever the template writes after the last assistant turn, a trailing
newline included; for strings the tokenizer's end token, unless the text ends with it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from ds_stochdpo.data.layouts import CanonicalRow, common_prefix_length
from ds_stochdpo.data.messages import Message
from ds_stochdpo.data.tally import BadRowError
from ds_stochdpo.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


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
        self._has_warned_tools = False

    def render(self, row: CanonicalRow, source: str) -> RenderedPair:
        """Tokenise one row.

        Args:
            row: Strings are taken as they are; messages go through the chat template.
            source: "file:line" for messages.

        Raises:
            BadRowError: If the prompt or a response has no token, both responses have the same ones, or the
                template refuses the row or rewrites its prompt.
            DataError: If there are messages but no chat template, or the template drops tool calls.
        """
        if isinstance(row.prompt, str):
            prompt = self._encode(row.prompt)
            chosen, rejected = (self._encode_whole(row.prompt, side) for side in (row.chosen, row.rejected))
            boundary = common_prefix_length(prompt, chosen, rejected)
        else:
            prompt, chosen, rejected = self._apply_template(row, source)
            boundary = common_prefix_length(prompt, chosen, rejected)
            if boundary < len(prompt):
                self._check_prompt_kept(row)
        if boundary == 0:
            raise BadRowError("prompt is empty", "no token before the responses")
        return _split(chosen, rejected, boundary)

    def _encode(self, text: str) -> list[int]:
        ids = list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        return ids if ids[:1] == self._bos_ids else self._bos_ids + ids

    def _encode_whole(self, prompt: str, response: Any) -> list[int]:
        ids = self._encode(prompt + response)
        eos, eos_id = self.tokenizer.eos_token, self.tokenizer.eos_token_id
        if eos_id is None or (response.endswith(eos) and ids[-1:] == [eos_id]):
            return ids
        return [*ids, eos_id]

    def _apply_template(self, row: CanonicalRow, source: str) -> tuple[list[int], list[int], list[int]]:
        if not self.tokenizer.chat_template:
            raise DataError(
                f"{source}: the row holds messages, but the tokenizer has no chat template; "
                "use a model with one, or give prompt, chosen and rejected as strings."
            )
        prompt, chosen, rejected = _conversations(row)
        self._check_tools(row, source)
        return (
            self._template_ids(prompt, row, add_generation_prompt=True),
            self._template_ids(chosen, row),
            self._template_ids(rejected, row),
        )

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
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=row.tools, **options, **(row.template_options or {})
            )
        except jinja2.TemplateError as error:
            raise BadRowError("template refuses the row", str(error)) from None

    def _check_prompt_kept(self, row: CanonicalRow) -> None:
        """The prompt's last message must lie before the boundary, or prompt text would be scored."""
        prompt, chosen, rejected = _conversations(row)
        texts = [self._template(prompt, row, tokenize=False, add_generation_prompt=True)]
        texts += [self._template(side, row, tokenize=False) for side in (chosen, rejected)]
        if prompt[-1]["content"].strip() not in texts[0][: common_prefix_length(*texts)]:
            raise BadRowError("template rewrites the prompt", "the last prompt message changes once a response follows")

    def _check_tools(self, row: CanonicalRow, source: str) -> None:
        """A template without tool support leaves calls and schemas out without a word."""
        _, chosen, rejected = _conversations(row)
        calls = [call for message in (*chosen, *rejected) for call in message.get("tool_calls", ())]
        if not calls and not row.tools:
            return
        text = "".join(self._template(side, row, tokenize=False) for side in (chosen, rejected))
        for name in map(_function_name, calls):
            if name not in text:
                raise DataError(
                    f"{source}: the chat template drops tool_calls (function {name!r} is not rendered); "
                    "use a template with tool support, or leave these rows out."
                )
        missing = [name for name in map(_function_name, row.tools or ()) if name not in text]
        if missing and not self._has_warned_tools:
            self._has_warned_tools = True
            logger.warning("%s: the chat template does not render tools (%s)", source, ", ".join(missing))


def _split(chosen: list[int], rejected: list[int], boundary: int) -> RenderedPair:
    for field, ids in (("chosen", chosen), ("rejected", rejected)):
        if len(ids) == boundary:
            raise BadRowError("no response tokens", f"{field} adds no token to the prompt")
    if chosen == rejected:
        raise BadRowError("identical responses", "chosen and rejected have the same tokens")
    parts = (chosen[:boundary], chosen[boundary:], rejected[boundary:])
    prompt_ids, chosen_ids, rejected_ids = (np.array(part, dtype=np.int64) for part in parts)
    return RenderedPair(prompt_ids, chosen_ids, rejected_ids)


def _conversations(row: CanonicalRow) -> tuple[list[Message], list[Message], list[Message]]:
    assert isinstance(row.prompt, list)
    assert isinstance(row.chosen, list)
    assert isinstance(row.rejected, list)
    return row.prompt, row.prompt + row.chosen, row.prompt + row.rejected


def _function_name(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, dict) else {}
    return str(function.get("name", "")) if isinstance(function, dict) else ""
