"""Which models can be run in two lanes, and where their parts are. Entry: `family_of`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ds_stochdpo.errors import ModelError
from ds_stochdpo.model.scoring import ScoringOptions


@dataclass(frozen=True)
class Family:
    """Where a family of models keeps its parts, as paths below the base model.

    Attributes:
        layers: List of decoder layers.
        norm: Final norm.
        embeddings: (path, reads positions) of each embedding that is summed into the first hidden state.
        rotary: Rotary embedding module; empty where positions are embedded.
        norm_keeps_rows: The model's forward reshapes the norm's output, so it must keep its length.
    """

    layers: str = "layers"
    norm: str = "norm"
    embeddings: tuple[tuple[str, bool], ...] = (("embed_tokens", False),)
    rotary: str = "rotary_emb"
    norm_keeps_rows: bool = False

    def scoring(self, config: Any, options: ScoringOptions) -> ScoringOptions:
        """Scoring options with the logit changes the model's config asks for."""
        softcap = getattr(config, "final_logit_softcapping", None)
        return dataclasses.replace(options, logit_softcap=softcap)


_LLAMA_LIKE = Family()
FAMILIES: dict[str, Family] = {
    "llama": _LLAMA_LIKE,
    "mistral": _LLAMA_LIKE,
    "qwen2": _LLAMA_LIKE,
    "qwen3": _LLAMA_LIKE,
    "gpt2": Family("h", "ln_f", (("wte", False), ("wpe", True)), "", norm_keeps_rows=True),
}
"""Keyed by `config.model_type`; each is tested against the model's own forward."""

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def family_of(lm: PreTrainedModel) -> Family:
    """The two-lane description of a model.

    Args:
        lm: A causal LM.

    Returns:
        Its family.

    Raises:
        ModelError: If the family is not supported, or this model differs from it in a way two lanes cannot keep exact.
    """
    kind = getattr(lm.config, "model_type", type(lm).__name__)
    if kind not in FAMILIES:
        raise ModelError(
            f"model_type {kind} ({type(lm).__name__}) cannot be run in two lanes; "
            f"supported: {', '.join(sorted(FAMILIES))}."
        )
    head = lm.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None:
        raise ModelError(
            f"{type(lm).__name__} needs an output head that is a plain nn.Linear without bias, got {head}; "
            "load it with AutoModelForCausalLM and without adapters on the head."
        )
    rope = getattr(lm.config, "rope_parameters", None) or {}
    if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
        raise ModelError(
            f"rope_type {rope['rope_type']} picks its frequencies by the longest row, so packing would change scores; "
            "use a model with default, linear, llama3 or yarn rotary embeddings."
        )
    if getattr(lm.config, "add_cross_attention", False):
        raise ModelError(f"{type(lm).__name__} has cross-attention, which two lanes do not run.")
    return FAMILIES[kind]
