"""Short spellings for messages, and what a pair decodes to."""


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


def human(text):
    return {"from": "human", "value": text}


def gpt(text):
    return {"from": "gpt", "value": text}


def chatml(*messages, header=False):
    """The fixture template, written by hand."""
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return text + ("<|im_start|>assistant\n" if header else "")


def decoded(tokenizer, pair):
    """Prompt, chosen and rejected of a pair as text."""
    return tuple(tokenizer.decode(ids) for ids in (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids))


def ids_of(pair_set):
    """All token ids of a set, for comparing two ways to give the same rows."""
    return [(p.prompt_ids.tolist(), p.chosen_ids.tolist(), p.rejected_ids.tolist()) for p in pair_set.pairs]
