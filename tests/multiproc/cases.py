"""Models, pairs, settings and the plain training loop that the multi-process tests share."""

import numpy as np
import torch
import torch.nn.functional as F

from tests.oracle import branch_logps, random_pairs
from tests.tiny import tiny_gpt2, tiny_llama, tiny_model

VOCAB = 97
BETA = 0.3
NUM_LAYERS = 3
NUM_STEPS = 4
PRUNED = {"position_keep": 0.5, "prefix_keep": 0.6, "branch": "single"}
PRUNED_OTHERWISE = {
    "position_keep": 0.6,
    "position_sampler": "bernoulli",
    "prefix_keep": 0.7,
    "prefix_sampler": "floor",
    "branch": "single",
    "branch_prob": "sqrt_length",
    "branch_balance": "iid",
}
# (prompt, chosen, rejected) tokens of one optimizer step. The first half goes to rank 0, long and uneven; the second
# to rank 1, short, with responses of one token.
STEP_LENGTHS = [(6, 19, 5), (4, 12, 17), (9, 3, 11), (2, 14, 16), (3, 1, 6), (2, 5, 1), (1, 1, 1), (4, 2, 1)]


# Windows shorter than the rows, caps low and multipliers far enough from 1 to move every score.
OTHER_FAMILIES = {
    "phi3": {"sliding_window": 6, "partial_rotary_factor": 0.5},
    "olmo2": {},
    "smollm3": {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 5},
    "gemma3_text": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 5,
        "head_dim": 8,
        "query_pre_attn_scalar": 4,
        "final_logit_softcapping": 3.0,
    },
    "gemma2": {
        "sliding_window": 5,
        "head_dim": 8,
        "query_pre_attn_scalar": 4,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "granite": {
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.4,
        "logits_scaling": 1.5,
    },
    "qwen3_moe": {
        "head_dim": 8,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "mixtral": {
        "intermediate_size": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "router_jitter_noise": 0.1,
    },
}


def model(kind="llama", *, tie=False, layers=NUM_LAYERS):
    """Random weights large enough that every margin and every gradient counts; the same in every process."""
    if kind == "gpt2":
        return tiny_gpt2(VOCAB, n_layer=layers, initializer_range=0.2)
    if kind in OTHER_FAMILIES:
        settings = OTHER_FAMILIES[kind]
        return tiny_model(kind, VOCAB, tie=tie, num_hidden_layers=layers, initializer_range=0.2, **settings)
    return tiny_llama(VOCAB, tie=tie, num_hidden_layers=layers, initializer_range=0.2)


def step_pairs(lengths=STEP_LENGTHS, steps=NUM_STEPS, refs=True):
    """Global pairs of each optimizer step, ids running on; the responses share their first two tokens."""
    pairs = random_pairs(list(lengths) * steps, VOCAB, seed=5, shared=2, refs=refs)
    return [pairs[s * len(lengths) : (s + 1) * len(lengths)] for s in range(steps)]


def shares(pairs, num_first):
    """The pairs of rank 0 and of rank 1."""
    return pairs[:num_first], pairs[num_first:]


def deepspeed_json(stage, optimizer, **zero):
    """DeepSpeed settings with every parameter partitioned, nothing prefetched and no clipping."""
    return {
        "optimizer": optimizer,
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_reuse_distance": 0,
            "log_trace_cache_warnings": True,
            **zero,
        },
    }


SGD = {"type": "SGD", "params": {"lr": 0.03}}
# With the usual eps, 1e-8, rounding in tiny gradients would decide the sign of an update.
ADAMW = {
    "type": "AdamW",
    "params": {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.0, "torch_adam": True},
}


def global_draws(plan, pairs, *, seed, step):
    """Draws for the pairs of all ranks."""
    from ds_stochdpo.pruning import draw_pairs

    return draw_pairs(
        plan,
        seed=seed,
        epoch=0,
        step=step,
        pair_ids=[p.pair_id for p in pairs],
        chosen_lengths=[len(p.chosen_ids) for p in pairs],
        rejected_lengths=[len(p.rejected_ids) for p in pairs],
    )


def plain_pair_loss(lm, pair, draw, *, num_pairs):
    """Loss value and surrogate of one pair from the model's own forward of each branch alone."""
    log_ratio, policy = {}, {}
    for branch in ("chosen", "rejected"):
        # Tokens that both responses begin with cancel in the margin.
        own = getattr(draw, branch).positions >= pair.shared_start
        positions = torch.from_numpy(getattr(draw, branch).positions[own])
        weights = torch.from_numpy(getattr(draw, branch).weights[own])
        logps = branch_logps(lm, pair.prompt_ids, getattr(pair, f"{branch}_ids"))[positions]
        ref = torch.from_numpy(getattr(pair, f"{branch}_ref_logps").astype(np.float64))[positions]
        policy[branch] = (weights * logps).sum()
        log_ratio[branch] = float(policy[branch].detach() - (weights * ref).sum())
    margin = torch.tensor(log_ratio["chosen"] - log_ratio["rejected"], dtype=torch.float64)
    slope = -BETA * torch.sigmoid(-BETA * margin)
    surrogate = 0.0
    for branch, sign in (("chosen", 1.0), ("rejected", -1.0)):
        if draw.kept in ("both", branch):
            surrogate = surrogate + slope * sign / draw.kept_prob * policy[branch]
    return -F.logsigmoid(BETA * margin), surrogate / num_pairs


def plain_training(lm, batches, draws_of, optimizer):
    """Train in one process, without DeepSpeed and without the package's engine; returns loss and norm of each step."""
    settings = {k: v for k, v in optimizer["params"].items() if k != "torch_adam"}
    torch_optimizer = getattr(torch.optim, optimizer["type"])(lm.parameters(), **settings)
    lm.eval()
    records = []
    for step, pairs in enumerate(batches):
        torch_optimizer.zero_grad()
        losses = []
        for pair, draw in zip(pairs, draws_of(pairs, step), strict=True):
            loss, surrogate = plain_pair_loss(lm, pair, draw, num_pairs=len(pairs))
            surrogate.backward()
            losses.append(float(loss))
        norm = sum(float((p.grad.double() ** 2).sum()) for p in lm.parameters()) ** 0.5
        torch_optimizer.step()
        records.append({"loss": float(np.mean(losses)), "grad_norm": norm})
    return records
