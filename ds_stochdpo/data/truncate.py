"""Cutting a pair to length without starving a branch.

Floor: data. Entry: `truncate`. Three rules, in this order:

1. The prompt is cut once for both responses: to `max_prompt_length` if that is set; else, if prompt plus the
   longer response exceed `max_length`, to what that response leaves, but not below half of `max_length`.
   Either leaves at least one token for each response.
2. `keep_end` cuts the prompt from the left, `keep_start` from the right. A begin token at position 0 stays.
3. Each response by itself is cut from the right to what the prompt left of `max_length`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.data.render import RenderedPair
from ds_stochdpo.data.tally import BadRowError
from ds_stochdpo.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LengthLimits:
    """Limits in tokens.

    Attributes:
        max_length: Longest prompt plus response, at least 2; None: no limit.
        max_prompt_length: Longest prompt, at least 1; None: see the module's first rule.
        truncation_mode: `keep_end` or `keep_start`.
        bos_id: Begin token that survives `keep_end`; None: there is none.
    """

    max_length: int | None
    max_prompt_length: int | None
    truncation_mode: str = "keep_end"
    bos_id: int | None = None


def resolve_limits(config: StochDPOConfig, context_length: int | None, bos_id: int | None) -> LengthLimits:
    """Limits in force for a model.

    Args:
        config: Its `max_length`, `max_prompt_length` and `truncation_mode`.
        context_length: Positions the model has; default and upper bound of `max_length`. None: unknown.
        bos_id: Begin token of the tokenizer.

    Raises:
        ConfigError: If a setting exceeds what the model or another setting allows.
    """
    asked, prompt_limit = config.max_length, config.max_prompt_length
    if asked is not None and context_length is not None and asked > context_length:
        raise ConfigError(
            f"max_length is {asked}, but the model has {context_length} positions; lower it to at most that."
        )
    max_length = context_length if asked is None else asked
    if asked is None:
        logger.info("max_length is not set; it is %s", context_length or "without limit: the model tells none")
    if prompt_limit is not None and max_length is not None and prompt_limit >= max_length:
        raise ConfigError(f"max_prompt_length is {prompt_limit}; it must be below max_length ({max_length}): lower it.")
    return LengthLimits(max_length, prompt_limit, config.truncation_mode, bos_id)


def truncate(pair: RenderedPair, limits: LengthLimits) -> tuple[RenderedPair, list[str]]:
    """The pair within the limits, and which parts were cut by which limit.

    Raises:
        BadRowError: If the responses are equal after the cut.
    """
    cuts: list[str] = []
    prompt, chosen, rejected = pair.prompt_ids, pair.chosen_ids, pair.rejected_ids
    longest = max(len(chosen), len(rejected))
    prompt_room, cause = _prompt_room(len(prompt), longest, limits)
    if len(prompt) > prompt_room:
        prompt = _cut_prompt(prompt, prompt_room, limits)
        cuts.append(f"prompt ({cause})")
    if limits.max_length is not None:
        room = limits.max_length - len(prompt)
        for field, ids in (("chosen", chosen), ("rejected", rejected)):
            if len(ids) > room:
                cuts.append(f"{field} (max_length)")
        chosen, rejected = chosen[:room], rejected[:room]
    if np.array_equal(chosen, rejected):
        raise BadRowError(
            "identical after truncation", f"the responses differ only after their first {len(chosen)} tokens"
        )
    return RenderedPair(prompt, chosen, rejected), cuts


def _prompt_room(num_prompt: int, longest: int, limits: LengthLimits) -> tuple[int, str]:
    if limits.max_prompt_length is not None:
        return limits.max_prompt_length, "max_prompt_length"
    if limits.max_length is None:
        return num_prompt, ""
    return max(limits.max_length - longest, limits.max_length // 2), "max_length"


def _cut_prompt(prompt: np.ndarray, room: int, limits: LengthLimits) -> np.ndarray:
    if limits.truncation_mode == "keep_start":
        return prompt[:room]
    # A token that opens every turn may double as begin token (ChatML models); only one that occurs once marks
    # the start of the text.
    starts_with_bos = prompt[0] == limits.bos_id and not (prompt[1:] == limits.bos_id).any()
    if starts_with_bos:
        return np.concatenate([prompt[:1], prompt[len(prompt) - room + 1 :]])
    return prompt[len(prompt) - room :]
