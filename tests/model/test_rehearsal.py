"""Memory of a step on the meta device against the tensors that real steps hold."""

import pytest
import torch
from torch import nn

from ds_stochdpo.config import PruningPlan
from ds_stochdpo.model import (
    FAMILIES,
    ScoringOptions,
    TwoLaneModel,
    choose_backend,
    rehearsal_backend,
    rehearse_lanes,
    rehearse_stock,
)
from ds_stochdpo.model.rehearsal import StepMemory, TensorMeter, lanes_logps, measure_step
from ds_stochdpo.packing import pack_lanes
from ds_stochdpo.pruning import draw_pairs
from tests.oracle import padded_dpo_loss, random_pairs
from tests.tiny import tiny_gpt2, tiny_llama, tiny_model

pytestmark = pytest.mark.usefixtures("plain_linear")

VOCAB = 1500
PAIRS = random_pairs([(40, 120, 60), (100, 30, 80), (12, 70, 160), (50, 90, 90)], VOCAB, shared=3)
LONGEST = 180
SCORING = ScoringOptions(chunk_rows=64)
PLANS = {
    "exact": PruningPlan(),
    "branch": PruningPlan(branch="single"),
    "all": PruningPlan(branch="single", prefix_keep=0.6, position_keep=0.5),
}


def small(kind):
    if kind == "llama":
        return tiny_llama(VOCAB, hidden_size=64, intermediate_size=192, num_hidden_layers=4, context=512)
    return tiny_gpt2(VOCAB, n_embd=64, n_layer=4, context=512)


def on_meta(kind):
    with torch.device("meta"):
        return small(kind)


def layout_of(plan, share_prompt=True):
    draws = draw_pairs(
        plan,
        seed=1,
        epoch=0,
        step=0,
        pair_ids=range(4),
        chosen_lengths=[len(p.chosen_ids) for p in PAIRS],
        rejected_lengths=[len(p.rejected_ids) for p in PAIRS],
    )
    return pack_lanes(PAIRS, draws, share_prompt=share_prompt)


def real_model(kind, checkpointing=False, scoring=SCORING):
    _, backend = choose_backend("sdpa", torch.device("cpu"), torch.float32)
    return TwoLaneModel(small(kind), backend, scoring, gradient_checkpointing=checkpointing)


def rehearsed(kind, layout, checkpointing=False, scoring=SCORING, kernel="sdpa"):
    model = TwoLaneModel(on_meta(kind), rehearsal_backend(kernel), scoring, gradient_checkpointing=checkpointing)
    return rehearse_lanes(model, layout)


def close(memory, measured, rel):
    assert memory.peak == pytest.approx(measured.peak, rel=rel)
    for part in ("kept", "head", "layers"):
        assert getattr(memory, part) == pytest.approx(getattr(measured, part), rel=rel, abs=rel * measured.peak)


@pytest.mark.parametrize(
    ("plan", "share_prompt"), [("exact", True), ("branch", True), ("branch", False), ("all", True)]
)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_lanes(kind, plan, share_prompt, checkpointing):
    layout = layout_of(PLANS[plan], share_prompt)
    model = real_model(kind, checkpointing)
    measured = measure_step(model, lambda begins: lanes_logps(model, layout, begins).sum())
    close(rehearsed(kind, layout, checkpointing), measured, rel=0.01)


@pytest.mark.parametrize("plan", ["exact", "all"])
def test_a_flash_kernel_keeps_neither_masks_nor_a_copy_of_its_output(plan):
    layout = layout_of(PLANS[plan])
    sdpa, flash = (rehearsed("llama", layout, kernel=kernel).peak for kernel in ("sdpa", "flash"))
    assert 0.9 * sdpa < flash < sdpa


@pytest.mark.parametrize("recompute", [True, False])
def test_the_head(recompute):
    """Its chunk, its kept slopes and the gradient of its matrix."""
    scoring = ScoringOptions(chunk_rows=16, recompute=recompute)
    layout = layout_of(PruningPlan())
    model = real_model("llama", scoring=scoring)
    measured = measure_step(model, lambda begins: lanes_logps(model, layout, begins).sum())
    close(rehearsed("llama", layout, scoring=scoring), measured, rel=0.01)
    rows = len(layout.live_rows.row_K)
    assert (measured.head > 4 * VOCAB * rows) == (not recompute)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_stock(kind, checkpointing):
    lm = small(kind)
    lm.train()
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if checkpointing:
        lm.activation_checkpointing_enable()

    def loss(begins):
        hook = lm.get_output_embeddings().register_forward_pre_hook(lambda _, args: begins(args[0]))
        result = padded_dpo_loss(lm, PAIRS)
        hook.remove()
        return result

    measured = measure_step(lm, loss)
    memory = rehearse_stock(on_meta(kind), rows=8, length=LONGEST, checkpointing=checkpointing, kernel="sdpa")
    close(memory, measured, rel=0.02)
    # Logits of 8 x 180 rows, their log-softmax and a gradient: three times the vocabulary in fp32.
    assert memory.head == pytest.approx(3 * 4 * VOCAB * 8 * LONGEST, rel=0.05)


def test_a_response_head_on_padded_rows():
    full, rows = (
        rehearse_stock(on_meta("llama"), rows=8, length=LONGEST, checkpointing=True, scored=scored, scoring=SCORING)
        for scored in (None, 700)
    )
    assert rows.kept == pytest.approx(full.kept, rel=0.1)
    assert rows.head < full.head / 10


def test_what_is_kept_is_what_autograd_saves():
    """Saved tensors by autograd's own hooks, in which the meter has no part."""
    layout = layout_of(PLANS["branch"])
    model = real_model("llama")
    weights = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    saved = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        live_logp_K, _ = model(layout)
    assert live_logp_K.requires_grad
    assert rehearsed("llama", layout).kept == pytest.approx(sum(s.nbytes() for s in saved.values()), rel=0.03)


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_is_rehearsed(kind):
    with torch.device("meta"):
        lm = tiny_gpt2(VOCAB) if kind == "gpt2" else tiny_model(kind, VOCAB)
    model = TwoLaneModel(lm, rehearsal_backend(), SCORING, gradient_checkpointing=True)
    layout = layout_of(PLANS["branch"])
    memory = rehearse_lanes(model, layout)
    # Checkpointing keeps one row a live token and layer; the layer's own work is recomputed, one layer at a time.
    inputs = len(layout.live.ids_T) * 2 * lm.config.hidden_size * 4
    assert inputs <= memory.kept < memory.layers + inputs


def test_a_dummy_needs_next_to_nothing():
    memory = rehearsed("llama", pack_lanes([], []))
    assert memory.kept < 2**16


def test_the_meter_sees_views_once_and_what_is_freed():
    module = nn.Linear(4, 4)
    with TensorMeter(module) as meter:
        first = torch.zeros(100)
        views = (first.view(10, 10), first[3:], module.weight.T)
        assert meter.live_bytes == 400
        second = first + 1
        del first, views
        assert (meter.live_bytes, meter.restart(), meter.peak_bytes) == (400, 800, 400)
        del second
    assert meter.live_bytes == 0
    assert StepMemory(1, 5, 3).peak == 6
