"""A tiny float64 GPT-2 and plain-autograd DPO on it: what the whole path is compared with."""

import copy
import functools
import itertools
import math
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.engine.step import micro_step
from ds_stochdpo.model import ScoringOptions, TwoLaneModel
from ds_stochdpo.model.attention import sdpa_backend
from ds_stochdpo.packing import pack_lanes
from ds_stochdpo.pruning import draw_response, prefix_law
from ds_stochdpo.pruning.draws import BranchDraw, PairDraw, full_draw
from tests.oracle import branch_logps, random_pairs

VOCAB = 29
BETA = 0.7
EXACT = 1e-12
BROKEN = 1e-3
BRANCHES = ("chosen", "rejected")


def tiny_gpt2(seed=0, **config):
    """Two layers, every parameter random; the attention of `branch_logps` is transformers' own."""
    torch.manual_seed(seed)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": VOCAB}
    lm = GPT2LMHeadModel(GPT2Config(**sizes, attn_implementation="eager", **config)).double().eval()
    with torch.no_grad():
        for p in lm.parameters():
            p += 0.3 * torch.randn_like(p)
    return lm


POLICY = tiny_gpt2(seed=0)


def near(lm, seed=1, step=0.05):
    """A model a little way off, as reference: its log-ratios are small but not 0."""
    other = copy.deepcopy(lm)
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in other.parameters():
            p += step * torch.randn_like(p)
    return other


REFERENCE = near(POLICY)


def reference_logps(lm, pair, branch):
    with torch.no_grad():
        return branch_logps(lm, pair.prompt_ids, getattr(pair, f"{branch}_ids")).numpy()


def scored_pairs(lengths, *, seed=0, shared=0, reference=REFERENCE):
    """Random pairs with float64 reference log-probs of a real model."""
    pairs = random_pairs(lengths, VOCAB, seed=seed, shared=shared)
    return [replace(p, **{f"{b}_ref_logps": reference_logps(reference, p, b) for b in BRANCHES}) for p in pairs]


def full_draws(pairs):
    return [full_draw(len(p.chosen_ids), len(p.rejected_ids)) for p in pairs]


def keep(draw, kept, prob):
    return replace(draw, kept=kept, kept_prob=prob)


@functools.lru_cache(maxsize=16)
def two_lane(lm, options, checkpointing):
    """The two-lane form of a model; made once for each setting, since many outcomes run through it."""
    return TwoLaneModel(copy.deepcopy(lm), sdpa_backend, options, gradient_checkpointing=checkpointing)


class Run:
    """What one micro-batch gave: surrogate gradient, mean loss, and log-probs a pair."""

    def __init__(
        self,
        pairs,
        draws,
        *,
        lm=POLICY,
        config=None,
        num_pairs=None,
        options=None,
        layout_edit=None,
        checkpointing=False,
        **packing,
    ):
        config = config or StochDPOConfig(beta=BETA)
        self.layout = pack_lanes(pairs, draws, **packing)
        if layout_edit:
            self.layout = layout_edit(self.layout)
        model = two_lane(lm, options or ScoringOptions(chunk_rows=4), checkpointing)
        model.zero_grad()
        self.logps = model(self.layout)
        step = micro_step(self.layout, draws, *self.logps, config, num_pairs_global=num_pairs or len(pairs))
        step.surrogate.backward()
        names = (
            "loss",
            "rewards/chosen",
            "rewards/rejected",
            "margin",
            "accuracy",
            "logps/chosen",
            "logps/rejected",
        )
        self.sums = dict(zip(names, step.sums.tolist(), strict=False))
        self.logps = [logp.detach() for logp in self.logps]
        self.margin = self.sums["margin"] / config.beta
        self.loss = self.sums["loss"] / (num_pairs or len(pairs))
        self.grad = flat(model.lm)


def flat(lm):
    """All gradients in one vector; a parameter without one counts as 0."""
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in lm.parameters()])


def gap(a, b):
    """Norm of the difference of two gradients, relative to the second."""
    return ((a - b).norm() / b.norm()).item()


def sampled_ratio(lm, pair, branch, drawn):
    """delta_hat of one branch, by the model's own forward of that branch alone."""
    logps = branch_logps(lm, pair.prompt_ids, getattr(pair, f"{branch}_ids"))
    ratio = logps - torch.from_numpy(getattr(pair, f"{branch}_ref_logps"))
    return (torch.from_numpy(drawn.weights) * ratio[torch.from_numpy(drawn.positions)]).sum()


def losses(margin, loss_type="sigmoid", smoothing=0.0, beta=BETA):
    """METHOD.md M2, written once more."""
    h = beta * margin
    if loss_type == "hinge":
        return torch.relu(1 - h)
    up, down = -F.logsigmoid(h), -F.logsigmoid(-h)
    if loss_type == "robust":
        return ((1 - smoothing) * up - smoothing * down) / (1 - 2 * smoothing)
    return (1 - smoothing) * up + smoothing * down


def autograd(pairs, draws, *, lm=POLICY, loss=losses):
    """(mean loss, margins, gradient) of the sampled objective, both branches, by plain autograd."""
    lm = copy.deepcopy(lm)
    margins = torch.stack(
        [
            sampled_ratio(lm, p, "chosen", d.chosen) - sampled_ratio(lm, p, "rejected", d.rejected)
            for p, d in zip(pairs, draws, strict=True)
        ]
    )
    value = loss(margins).mean()
    value.backward()
    return value.item(), margins.detach(), flat(lm)


def mask_outcomes(keep_prob, longest):
    """(probability, uniforms) of every Bernoulli mask; both branches read the same numbers."""
    for bits in itertools.product([True, False], repeat=longest):
        prob = np.prod([keep_prob if b else 1 - keep_prob for b in bits])
        yield float(prob), np.array([0.5 * keep_prob if b else 0.5 * (1 + keep_prob) for b in bits])


def prefix_outcomes(plan, lengths):
    """(probability, uniform) of every joint outcome of the prefixes of one pair."""
    laws = [
        prefix_law(n, keep=plan.prefix_keep, sampler=plan.prefix_sampler, min_survival=plan.prefix_min_survival)
        for n in lengths
    ]
    edges = sorted({0.0, 1.0, *(float(s) for law in laws for s in law.survival_probs)})
    return [(b - a, (a + b) / 2) for a, b in itertools.pairwise(edges) if b > a]


def outcomes(plan, pair):
    """(probability, draw) of one pair over every prefix and every Bernoulli mask."""
    lengths = (len(pair.chosen_ids), len(pair.rejected_ids))
    prefixes = prefix_outcomes(plan, lengths)
    masks = list(mask_outcomes(plan.position_keep, max(lengths))) if plan.position_keep < 1 else [(1.0, np.zeros(9))]
    for (prefix_prob, u), (mask_prob, v) in itertools.product(prefixes, masks):
        drawn = [draw_response(plan, n, prefix_uniform=u, position_uniforms=v) for n in lengths]
        yield prefix_prob * mask_prob, PairDraw(*drawn)


def mean(weighted):
    """Probability-weighted mean of (probability, value)."""
    weighted = list(weighted)
    assert abs(math.fsum(p for p, _ in weighted) - 1) < 1e-12
    return sum(p * v for p, v in weighted)


def by_token(run):
    """Log-prob of each scored token, by (slot, position)."""
    groups = (run.layout.live_rows, run.layout.detached_rows, run.layout.frozen_rows)
    slots, positions = (torch.cat([getattr(g, n) for g in groups]).tolist() for n in ("slot_K", "position_K"))
    return dict(zip(zip(slots, positions, strict=True), torch.cat(run.logps).tolist(), strict=True))


def reweighted(draw, weights):
    """The draw with other weights, a function of the branch."""

    def change(branch):
        return BranchDraw(branch.prefix_tokens, branch.positions, weights(branch))

    return replace(draw, chosen=change(draw.chosen), rejected=change(draw.rejected))
