"""Chunked scoring against the full log-softmax: values, gradients, precision, size of what is held."""

import itertools

import pytest
import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ds_stochdpo.model import ScoringHead, ScoringOptions, chunked_logps, scoring
from tests.lifetimes import Lifetimes

ROWS, DIM, VOCAB = 7, 5, 23
OPTIONS = {
    "plain": {},
    "scale": {"logit_scale": 0.25},
    "cap": {"logit_softcap": 2.0},
    "both": {"logit_scale": 1.5, "logit_softcap": 3.0},
}


def full_logps(hidden, weight, target, options):
    """The same through one full [rows, vocab] log-softmax."""
    logits = hidden @ weight.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * options.logit_scale
    if options.logit_softcap is not None:
        logits = options.logit_softcap * torch.tanh(logits / options.logit_softcap)
    return logits.log_softmax(-1).gather(-1, target[:, None]).squeeze(-1)


def inputs(rows=ROWS, dim=DIM, vocab=VOCAB, dtype=torch.float64, seed=0, spread=1.0):
    torch.manual_seed(seed)
    hidden = (spread * torch.randn(rows, dim)).to(dtype).requires_grad_()
    weight = torch.randn(vocab, dim).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, vocab, (rows,))


def with_gradients(score, hidden, weight, target, options):
    logp = score(hidden, weight, target, options)
    probe = torch.cos(torch.arange(len(logp), dtype=logp.dtype)) + 0.1
    return [logp, *torch.autograd.grad((probe * logp).sum(), (hidden, weight))]


@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "keep"])
@pytest.mark.parametrize("chunk_rows", [1, 3, ROWS, 100])
@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)
def test_chunks_equal_the_full_log_softmax(changes, chunk_rows, recompute):
    options = ScoringOptions(chunk_rows, recompute, **changes)
    got = with_gradients(chunked_logps, *inputs(), options)
    want = with_gradients(full_logps, *inputs(), options)
    assert got[0].dtype == torch.float64
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("columns", [1, 5, VOCAB - 1, VOCAB])
@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)
def test_tiles_of_the_vocabulary_equal_the_full_log_softmax(monkeypatch, changes, columns):
    monkeypatch.setattr(scoring, "VOCAB_TILE", columns)
    options = ScoringOptions(3, **changes)
    parts = inputs()
    with Lifetimes(parts) as seen:
        got = with_gradients(chunked_logps, *parts, options)
    # Nothing holds rows x vocabulary but one tile: what else has two axes is as wide as the model.
    assert max(s[0] * s[1] for s in seen.shapes if len(s) == 2 and DIM not in s) <= 3 * columns
    want = with_gradients(full_logps, *inputs(), options)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "keep"])
@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)
def test_gradcheck(changes, recompute):
    hidden, weight, target = inputs(rows=4, vocab=6)
    options = ScoringOptions(3, recompute, **changes)
    assert torch.autograd.gradcheck(lambda h, w: chunked_logps(h, w, target, options), (hidden, weight))


def test_scale_and_cap_are_not_ignored():
    plain = chunked_logps(*inputs(), ScoringOptions(3))
    for name in ("scale", "cap", "both"):
        assert (chunked_logps(*inputs(), ScoringOptions(3, **OPTIONS[name])) - plain).abs().max() > 1e-2


@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "keep"])
def test_no_rows_give_no_scores_and_gradients_of_zero(recompute):
    hidden, weight, target = inputs(rows=0)
    logp = chunked_logps(hidden, weight, target, ScoringOptions(3, recompute))
    assert logp.shape == (0,)
    grads = torch.autograd.grad(logp.sum(), (hidden, weight))
    assert grads[0].shape == (0, DIM)
    assert torch.equal(grads[1], torch.zeros_like(weight))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_only_the_wanted_gradient_is_computed(frozen):
    hidden, weight, target = inputs()
    _, *grads = with_gradients(full_logps, hidden, weight, target, ScoringOptions())
    want = dict(zip(("hidden", "weight"), grads, strict=True))
    parts = {"hidden": hidden.detach(), "weight": weight.detach()}
    wanted = "weight" if frozen == "hidden" else "hidden"
    parts[wanted].requires_grad_()
    logp = chunked_logps(parts["hidden"], parts["weight"], target, ScoringOptions(3))
    probe = torch.cos(torch.arange(len(logp), dtype=logp.dtype)) + 0.1
    (grad,) = torch.autograd.grad((probe * logp).sum(), parts[wanted])
    torch.testing.assert_close(grad, want[wanted], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "keep"])
@pytest.mark.parametrize("seed", [0, 1])
def test_bf16_is_at_most_twice_as_far_from_fp32_as_plain_torch(seed, recompute):
    parts = inputs(rows=200, dim=64, vocab=301, dtype=torch.bfloat16, seed=seed, spread=0.3)
    options = ScoringOptions(16, recompute)
    exact = [p.detach().float().requires_grad_() if p.is_floating_point() else p for p in parts]
    truth = with_gradients(full_logps, *exact, options)
    ours = with_gradients(chunked_logps, *parts, options)
    plain = with_gradients(full_logps, *parts, options)
    assert ours[0].dtype == torch.float32
    assert [g.dtype for g in ours[1:]] == [torch.bfloat16] * 2
    for a, b, true in zip(ours, plain, truth, strict=True):
        gap, plain_gap = ((x.float() - true).norm().item() for x in (a, b))
        assert gap <= 2 * plain_gap
        assert gap < 0.02 * true.norm().item()


def test_bf16_weight_gradient_does_not_depend_on_the_number_of_chunks():
    parts = inputs(rows=256, dim=16, vocab=64, dtype=torch.bfloat16)
    grads = [with_gradients(chunked_logps, *parts, ScoringOptions(n))[2].float() for n in (1, 256)]
    exact = [p.detach().float().requires_grad_() if p.is_floating_point() else p for p in parts]
    truth = with_gradients(full_logps, *exact, ScoringOptions())[2]
    errors = [(g - truth).norm().item() for g in grads]
    # Adding 256 chunks in bf16 would be several times worse than one.
    assert errors[0] < 1.5 * errors[1]


class LargestVocabTensor(TorchDispatchMode):
    """Records the largest tensor with a vocabulary axis that an operation returns, weights [vocab, dim] aside."""

    def __init__(self, vocab, dim):
        super().__init__()
        self.vocab, self.weight_shapes, self.largest = vocab, {(vocab, dim), (dim, vocab)}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and self.vocab in tensor.shape:
                if tuple(tensor.shape) not in self.weight_shapes:
                    self.largest = max(self.largest, tensor.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "keep"])
@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)
def test_no_tensor_is_larger_than_one_chunk(changes, recompute, dtype):
    parts = inputs(rows=50, dtype=dtype)
    options = ScoringOptions(4, recompute, **changes)
    with LargestVocabTensor(VOCAB, DIM) as seen:
        with_gradients(chunked_logps, *parts, options)
    assert seen.largest == 4 * VOCAB
    with LargestVocabTensor(VOCAB, DIM) as seen:
        with_gradients(full_logps, *parts, options)
    assert seen.largest == 50 * VOCAB


@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "keep"])
def test_what_is_kept_for_the_backward_pass(recompute):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        chunked_logps(*inputs(rows=50), ScoringOptions(4, recompute))
    softmaxes = [shape for shape in kept if len(shape) == 2 and shape[1] == VOCAB]
    assert len(softmaxes) == (0 if recompute else 13)
    with torch.no_grad():
        kept.clear()
        chunked_logps(*inputs(rows=50), ScoringOptions(4, recompute))
    assert not kept


@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "keep"])
def test_an_impossible_token_is_minus_infinity_and_its_gradient_is_finite(recompute):
    # 1e30 * -1e30 overflows to a logit of -inf, as a run that has diverged makes it.
    hidden = torch.tensor([[1e30, 0.0], [0.0, 1.0], [1e30, 1.0]], requires_grad=True)
    weight = torch.tensor([[0.0, 1.0], [-1e30, 0.0], [0.0, 2.0]], requires_grad=True)
    logp = chunked_logps(hidden, weight, torch.tensor([1, 1, 2]), ScoringOptions(2, recompute))
    assert logp[0] == -torch.inf
    assert logp[1:].isfinite().all()
    # The impossible token leaves the softmax of the others alone.
    assert logp[2].item() == pytest.approx(-torch.log1p(torch.exp(torch.tensor(-1.0))).item())
    logp.sum().backward()
    assert not hidden.grad.isnan().any()
    assert not weight.grad.isnan().any()


@pytest.mark.parametrize("target", [VOCAB, -1, -100])
def test_a_target_outside_the_vocabulary_raises(target):
    hidden, weight, targets = inputs()
    targets[3] = target
    with pytest.raises((IndexError, RuntimeError), match=r"out of bounds|out of range"):
        chunked_logps(hidden, weight, targets, ScoringOptions(3))


def scoring_head(options):
    _, weight, _ = inputs()
    head = torch.nn.Linear(DIM, VOCAB, bias=False, dtype=torch.float64)
    head.weight.data.copy_(weight)
    head.__class__ = ScoringHead
    head.scoring = options
    return head


def test_head_scores_both_lanes_in_one_call_and_only_the_live_one_has_gradient():
    head = scoring_head(ScoringOptions(3))
    live, _, live_target = inputs(rows=4, seed=1)
    frozen, _, frozen_target = inputs(rows=5, seed=2)
    live_logp, frozen_logp = head(live, live_target, frozen, frozen_target)
    weight = head.weight.detach()
    torch.testing.assert_close(live_logp, full_logps(live, weight, live_target, ScoringOptions()))
    torch.testing.assert_close(frozen_logp, full_logps(frozen, weight, frozen_target, ScoringOptions()))
    assert live_logp.requires_grad
    assert not frozen_logp.requires_grad
    live_logp.sum().backward()
    assert frozen.grad is None
    alone = weight.clone().requires_grad_()
    (want,) = torch.autograd.grad(full_logps(live, alone, live_target, ScoringOptions()).sum(), alone)
    torch.testing.assert_close(head.weight.grad, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("num_live", "num_frozen"), [(0, 3), (3, 0), (0, 0)])
def test_head_takes_an_empty_lane(num_live, num_frozen):
    head = scoring_head(ScoringOptions(2))
    live, _, live_target = inputs(rows=num_live)
    frozen, _, frozen_target = inputs(rows=num_frozen)
    logps = head(live, live_target, frozen, frozen_target)
    assert [len(x) for x in logps] == [num_live, num_frozen]
    logps[0].sum().backward()
    # A rank with nothing to score still reaches the head's weight, so every rank reduces the same gradients.
    assert head.weight.grad is not None
    assert head.weight.grad.any() == (num_live > 0)


def test_rows_that_are_not_scored_do_not_matter():
    hidden, weight, target = inputs()
    rows = torch.tensor([0, 2, 5])
    want = chunked_logps(hidden, weight, target, ScoringOptions(3))[rows]
    poisoned = hidden.detach().clone()
    poisoned[[1, 3, 4, 6]] = torch.inf
    got = chunked_logps(poisoned[rows], weight, target[rows], ScoringOptions(3))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-14)


def test_every_chunk_size_gives_the_same_scores():
    scores = [chunked_logps(*inputs(rows=13), ScoringOptions(n)) for n in range(1, 15)]
    for a, b in itertools.pairwise(scores):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-14)
