"""Which models can be run in two lanes, where their parts are, and why others cannot. Entry: `family_of`."""

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
    """Where a family of models keeps its parts, as paths below the base model, and which settings its config names.

    Attributes:
        layers: List of decoder layers.
        norm: Final norm.
        embeddings: (path, reads positions) of each embedding that is summed into the first hidden state.
        rotary: Rotary embedding module; empty where positions are embedded.
        rotary_by_layer_type: The rotary module is called once for each type in `config.layer_types`.
        norm_keeps_rows: The model's forward reshapes the norm's output, so it must keep its length.
        mlp: Feed-forward block, or router and experts together, as a path below a layer.
        ffn_matrices: Matrices of the feed-forward block: 3 if gated, else 2.
        ends_in_product: A layer ends in its last feed-forward matrix and the residual sum, with nothing between them.
        embedding_multiplier: Setting the model's forward multiplies the embedding by, outside the embedding module.
        logits_divisor: Setting the logits are divided by.
        attention_softcap: Setting that caps attention scores.
        expert_ffn: Setting with the inner width of one expert; empty for dense models.
        router: Router of the experts, as a path below a layer; dense layers among sparse ones lack it.
        experts: The experts themselves, likewise.
    """

    layers: str = "layers"
    norm: str = "norm"
    embeddings: tuple[tuple[str, bool], ...] = (("embed_tokens", False),)
    rotary: str = "rotary_emb"
    rotary_by_layer_type: bool = False
    norm_keeps_rows: bool = False
    mlp: str = "mlp"
    ffn_matrices: int = 3
    ends_in_product: bool = True
    embedding_multiplier: str = ""
    logits_divisor: str = ""
    attention_softcap: str = ""
    expert_ffn: str = ""
    router: str = ""
    experts: str = ""

    def scoring(self, config: Any, options: ScoringOptions) -> ScoringOptions:
        """Scoring options with the logit changes the model's config asks for."""
        softcap = getattr(config, "final_logit_softcapping", None)
        scale = 1.0 / getattr(config, self.logits_divisor) if self.logits_divisor else 1.0
        return dataclasses.replace(options, logit_softcap=softcap, logit_scale=scale)

    def embedding_scale(self, config: Any) -> float:
        """Factor between the embedding module's output and the first hidden state."""
        return float(getattr(config, self.embedding_multiplier)) if self.embedding_multiplier else 1.0

    def caps_attention(self, config: Any) -> bool:
        """Whether attention scores pass a soft cap, which not every kernel computes."""
        return bool(self.attention_softcap) and getattr(config, self.attention_softcap) is not None

    def shape(self, config: Any) -> ModelShape:
        """Sizes that the work of a step depends on."""
        heads = config.num_attention_heads
        return ModelShape(
            hidden=config.hidden_size,
            layers=config.num_hidden_layers,
            ffn=self._ffn(config),
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocab=config.vocab_size,
            ffn_matrices=self.ffn_matrices,
            ends_in_product=self.ends_in_product,
        )

    def _ffn(self, config: Any) -> int:
        if self.expert_ffn:
            # The few dense layers a sparse model may have count as sparse ones.
            return int(getattr(config, self.expert_ffn) * config.num_experts_per_tok)
        dense = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
        return int(dense or 4 * config.hidden_size)


def _sparse(expert_ffn: str) -> Family:
    return Family(expert_ffn=expert_ffn, router="mlp.gate", experts="mlp.experts", ends_in_product=False)


_LLAMA_LIKE = Family()
FAMILIES: dict[str, Family] = {
    "llama": _LLAMA_LIKE,
    "mistral": _LLAMA_LIKE,
    "qwen2": _LLAMA_LIKE,
    "qwen3": _LLAMA_LIKE,
    "phi3": _LLAMA_LIKE,
    "olmo2": Family(ends_in_product=False),
    "smollm3": _LLAMA_LIKE,
    "gemma2": Family(attention_softcap="attn_logit_softcapping", ends_in_product=False),
    # transformers 5.24 keeps attn_logit_softcapping in Gemma3's config and never passes it to the attention.
    "gemma3_text": Family(rotary_by_layer_type=True, ends_in_product=False),
    "granite": Family(embedding_multiplier="embedding_multiplier", logits_divisor="logits_scaling"),
    "qwen3_moe": Family(
        expert_ffn="moe_intermediate_size", router="mlp.gate", experts="mlp.experts", ends_in_product=False
    ),
    "mixtral": Family(expert_ffn="intermediate_size", router="mlp.gate", experts="mlp.experts", ends_in_product=False),
    "gpt2": Family("h", "ln_f", (("wte", False), ("wpe", True)), "", norm_keeps_rows=True, ffn_matrices=2),
}
"""Keyed by `config.model_type`; each is tested against the model's own forward."""

_RECURRENT = "its recurrent layers carry a state along the row, so a response cannot be split from its prompt"
_POSITION_BIAS = "it adds a position bias to the attention scores, which the packed attention does not compute"
_IMAGES = "it also reads images; load the text model inside it as a checkpoint of its own"
_REFUSED = {
    **dict.fromkeys(
        ("bamba", "bailing_hybrid", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2",
         "lfm2_moe", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text",
         "qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2"),
        _RECURRENT,
    ),
    **dict.fromkeys(("bloom", "mpt"), _POSITION_BIAS),
    **dict.fromkeys(("gemma3", "gemma3n", "gemma4", "llama4", "qwen3_5", "qwen3_5_moe"), _IMAGES),
    "gpt_oss": "its attention sinks take part in every softmax, which the packed attention does not compute",
    "llama4_text": "its chunked attention depends on where a token stands in the row",
}  # fmt: skip
"""Why families that people bring cannot be run in two lanes, keyed by `config.model_type`."""


def family_of_config(config: Any, name: str = "this model") -> Family:
    """The two-lane description of a model, from its config alone: no weights need to be loaded.

    Args:
        config: Config of a causal LM.
        name: What to call the model in an error.

    Returns:
        Its family.

    Raises:
        ModelError: If the family is not supported, or the config asks for what two lanes cannot keep exact.
    """
    kind = getattr(config, "model_type", None)
    if kind not in FAMILIES:
        reason = f": {_REFUSED[kind]}" if kind in _REFUSED else ""
        raise ModelError(
            f"model_type {kind} ({name}) cannot be run in two lanes{reason}; supported: {', '.join(sorted(FAMILIES))}."
        )
    if getattr(config, "add_cross_attention", False):
        raise ModelError(f"{name} has cross-attention, which two lanes do not run.")
    if getattr(config, "use_bidirectional_attention", None):
        raise ModelError(
            f"{name} has use_bidirectional_attention: tokens see those after them; pruning rests on causal attention."
        )
    if getattr(config, "output_router_logits", False):
        raise ModelError(
            f"{name} has output_router_logits, which adds the router's balancing loss to the loss; that loss is no sum "
            "over tokens, so pruning would bias it: set output_router_logits to false (router/aux_loss reports it)."
        )
    return FAMILIES[kind]


def family_of(lm: PreTrainedModel) -> Family:
    """The two-lane description of a model.

    Args:
        lm: A causal LM.

    Returns:
        Its family.

    Raises:
        ModelError: If the family is not supported, or this model differs from it in a way two lanes cannot keep exact.
    """
    family = family_of_config(lm.config, type(lm).__name__)
    head = lm.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None:
        raise ModelError(
            f"{type(lm).__name__} needs an output head that is a plain nn.Linear without bias, got {head}; "
            "load it with AutoModelForCausalLM and without adapters on the head."
        )
    return family


def rotary_limit(config: Any) -> tuple[int, str] | None:
    """Longest sequence whose rotary frequencies do not depend on its length, and the type of these frequencies.

    Beyond it longrope and dynamic frequencies follow the longest row of a batch, so packing would change scores; up to
    it every row has the same ones.

    Args:
        config: Config of a supported model.

    Returns:
        Tokens and rope_type; None if no length changes the frequencies.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    # Models with several layer types keep one set of parameters for each.
    parts = [rope] if "rope_type" in rope else [part for part in rope.values() if isinstance(part, dict)]
    limits = []
    for part in parts:
        kind = part["rope_type"]
        if kind == "longrope":
            limits.append((int(part["original_max_position_embeddings"]), kind))
        elif kind == "dynamic":
            limits.append((int(config.max_position_embeddings), kind))
    return min(limits, default=None)
