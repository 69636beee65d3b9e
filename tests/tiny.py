"""Tiny tokenizer, models and preference rows, built in code: nothing is downloaded."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXT = [
    "Q: which city is the capital of France? A: Paris.",
    "Name one colour. Blue. Another. Green.",
    "Boil the egg for eight minutes.",
    "1 2 3 4 5 6 7 8 9 10 46",
] * 20
SPECIAL_TOKENS = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<pad>"]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer(pad="<pad>", bos=None, eos="<|im_end|>", template=CHAT, *, adds_bos=False):
    """Byte-level BPE with 347 tokens and a ChatML-like template; `adds_bos` puts `bos` before every text."""
    core = Tokenizer(models.BPE())
    core.decoder = decoders.ByteLevel()
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    core.train_from_iterator(TEXT, trainer)
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, core.token_to_id(bos))]
        )
    named = {name: value for name, value in (("pad_token", pad), ("bos_token", bos), ("eos_token", eos)) if value}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **named)
    tokenizer.chat_template = template
    return tokenizer


def tiny_llama(vocab=347, *, tie=False, seed=0, context=256, **config):
    """Two-layer Llama with 4 heads, 2 of them for keys and values; random weights from `seed`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings = {**sizes, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": 1, **config}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=vocab, max_position_embeddings=context, tie_word_embeddings=tie, **settings)
    )


def tiny_gpt2(vocab=347, *, dropout=0.0, seed=0, context=256, **config):
    """Two-layer GPT-2 (learned positions, tied head); random weights from `seed`."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    drops = {"resid_pdrop": dropout, "attn_pdrop": dropout, "embd_pdrop": dropout}
    settings = {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "bos_token_id": None,
        "eos_token_id": 1,
        **drops,
        **config,
    }
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocab, n_positions=context, **settings))


def tiny_model(kind, vocab=347, *, tie=False, seed=0, context=256, **config):
    """Two-layer model of any `model_type` with Llama's setting names; random weights from `seed`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": None}
    settings = {**sizes, **tokens, "num_key_value_heads": 2, **config}
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            kind, vocab_size=vocab, max_position_embeddings=context, tie_word_embeddings=tie, **settings
        )
    )


def pair_rows(count=24):
    """Short string pairs whose responses differ in length and content."""
    return [
        {
            "prompt": f"Name number {i}.",
            "chosen": f"It is {i}." + " Yes" * (i % 5),
            "rejected": "No idea" + "!" * (i % 3),
        }
        for i in range(count)
    ]


def write_rows(path, rows):
    """Write rows as JSON lines and return the path."""
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_pairs(path, count=24):
    """Write `pair_rows(count)` as JSON lines and return the path."""
    return write_rows(path, pair_rows(count))
