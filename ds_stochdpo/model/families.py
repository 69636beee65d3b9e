"""Which models can be run in two lanes, and where their parts are. Entry: `family_of`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ds_stochdpo.errors import ModelError
from ds_stochdpo.model.scoring import ScoringOptions
from ds_stochdpo.pruning import ModelShape


@dataclass(frozen=True)
class Family:
    """Where a family of models keeps its parts, as paths below the base model.

    Attributes:
        layers: List of decoder layers.
        norm: Final norm.
        embeddings: (path, reads positions) of each embedding that is summed into the first hidden state.
        rotary: Rotary embedding module; empty where positions are embedded.
        norm_keeps_rows: The model's forward reshapes the norm's output, so it must keep its length.
        ffn_matrices: Matrices of the feed-forward block: 3 if gated, else 2.
    """

    layers: str = "layers"
    norm: str = "norm"
    embeddings: tuple[tuple[str, bool], ...] = (("embed_tokens", False),)
    rotary: str = "rotary_emb"
    norm_keeps_rows: bool = False
    ffn_matrices: int = 3

    def scoring(self, config: Any, options: ScoringOptions) -> ScoringOptions:
        """Scoring options with the logit changes the model's config asks for."""
        softcap = getattr(config, "final_logit_softcapping", None)
        return dataclasses.replace(options, logit_softcap=softcap)

    def shape(self, config: Any) -> ModelShape:
        """Sizes that the work of a step depends on."""
        heads = config.num_attention_heads
        return ModelShape(
            hidden=config.hidden_size,
            layers=config.num_hidden_layers,
            ffn=getattr(config, "intermediate_size", None)
            or getattr(config, "n_inner", None)
            or 4 * config.hidden_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocab=config.vocab_size,
            ffn_matrices=self.ffn_matrices,
        )


_LLAMA_LIKE = Family()
FAMILIES: dict[str, Family] = {
    "llama": _LLAMA_LIKE,
    "mistral": _LLAMA_LIKE,
    "qwen2": _LLAMA_LIKE,
    "qwen3": _LLAMA_LIKE,
    "gpt2": Family("h", "ln_f", (("wte", False), ("wpe", True)), "", norm_keeps_rows=True, ffn_matrices=2),
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
