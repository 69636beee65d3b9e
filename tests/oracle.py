"""Plain PyTorch DPO, written without the package: what the tests compare it with."""

import numpy as np
import torch
import torch.nn.functional as F

from ds_stochdpo.data.pair import PreferencePair


def random_pairs(lengths, vocab, seed=0, shared=0, refs=False):
    """Pairs of random tokens; `lengths` holds (prompt, chosen, rejected); the responses share `shared` first tokens."""
    rng = np.random.default_rng(seed)
    pairs = []
    for pair_id, (num_prompt, num_chosen, num_rejected) in enumerate(lengths):
        prompt, chosen, rejected = (rng.integers(3, vocab, n) for n in (num_prompt, num_chosen, num_rejected))
        common = min(shared, num_chosen - 1, num_rejected - 1)
        rejected[:common] = chosen[:common]
        if common < min(num_chosen, num_rejected):
            rejected[common] = 3 + (chosen[common] - 3 + 1) % (vocab - 3)
        ref = [rng.normal(-3, 1, n).astype(np.float32) if refs else None for n in (num_chosen, num_rejected)]
        if refs:
            # The same tokens after the same prompt have the same reference.
            ref[1][:common] = ref[0][:common]
        pairs.append(PreferencePair(pair_id, prompt, chosen, rejected, "", *ref))
    return pairs


def branch_logps(lm, prompt, response):
    """Per-token log-probs of one response after its prompt, by the model's own forward of that sequence alone."""
    ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
    logits = lm(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None]).squeeze(-1)


def padded_dpo_loss(lm, pairs, beta=0.1, pad=0):
    """Mean sigmoid DPO loss of one padded, concatenated batch: chosen rows, then rejected rows, full logits."""
    rows = [np.concatenate([p.prompt_ids, r]) for r_name in ("chosen_ids", "rejected_ids") for p in pairs
            for r in [getattr(p, r_name)]]  # fmt: skip
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), pad)
    attends = torch.zeros_like(ids)
    scored = torch.zeros((len(rows), longest), dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.from_numpy(row)
        attends[i, : len(row)] = 1
        scored[i, len(pairs[i % len(pairs)].prompt_ids) : len(row)] = True
    logits = lm(input_ids=ids, attention_mask=attends, use_cache=False).logits[:, :-1]
    logps = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    logps = (logps * scored[:, 1:]).sum(-1)
    ref = torch.tensor(
        [0.0 if r is None else float(r.astype(np.float64).sum()) for p in pairs for r in [p.chosen_ref_logps]]
        + [0.0 if r is None else float(r.astype(np.float64).sum()) for p in pairs for r in [p.rejected_ref_logps]],
        dtype=logps.dtype,
    )
    chosen, rejected = (logps - ref).chunk(2)
    return -F.logsigmoid(beta * (chosen - rejected)).mean()


def relative_error(a, b):
    """Norm of the difference of two {name: tensor}, over the norm of the second."""
    assert a.keys() == b.keys()
    gap = sum(float(((a[k] - b[k]).double() ** 2).sum()) for k in a)
    return (gap / sum(float((b[k].double() ** 2).sum()) for k in b)) ** 0.5
