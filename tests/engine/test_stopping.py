"""What is not finite stops the run at every stage, before the weights are spoilt; wrong inputs get a sentence."""

import copy

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ds_stochdpo
from ds_stochdpo.data.dataset import fingerprint_of
from ds_stochdpo.engine.reference import _read_cache, _write_cache
from ds_stochdpo.pruning import full_draw
from tests.engine.test_gradient import VOCAB, tiny_llama
from tests.oracle import random_pairs

pytestmark = pytest.mark.usefixtures("single_process")

PAIRS = random_pairs([(6, 9, 5), (2, 3, 8)], VOCAB, refs=True)


def engine(stage=3, lm=None, lr_scheduler=None, **settings):
    ds = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    config = ds_stochdpo.StochDPOConfig(per_device_train_batch_size=2, **settings)
    return ds_stochdpo.initialize(model=lm or tiny_llama(), config=config, deepspeed=ds, lr_scheduler=lr_scheduler)


def spoil(trained, side):
    """Makes the gradient nan, or the log-probs inf, until the returned hook is removed."""
    head = trained.module.lm.get_output_embeddings()
    if side == "gradient":
        return head.register_full_backward_hook(lambda m, inputs, outputs: (inputs[0] * float("nan"), *inputs[1:]))
    # One log-prob of a chosen response is -inf: the loss is inf, its slope and so the gradient would be finite.
    infinite = torch.tensor(float("-inf"))
    return head.register_forward_hook(
        lambda m, inputs, outputs: (torch.cat([outputs[0][:1] + infinite, outputs[0][1:]]), *outputs[1:])
    )


def weights_of(trained, folder):
    trained.export(folder)
    return load_file(folder / "model.safetensors")


def assert_same(left, right):
    for name, value in right.items():
        assert torch.equal(left[name], value), name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("side", ["gradient", "loss"])
def test_what_is_not_finite_stops_the_engine(tmp_path, stage, side):
    trained = engine(stage)
    before = weights_of(trained, tmp_path / "before")
    hook = spoil(trained, side)
    what = {"gradient": "the gradient is not finite", "loss": "the loss is "}[side]
    with pytest.raises(ds_stochdpo.NonFiniteError, match=f"optimizer step 1: {what}.*: 0, 1. The weights"):
        trained.train_step(PAIRS)
    hook.remove()
    with pytest.raises(ds_stochdpo.StochDPOError, match="has stopped"):
        trained.train_step(PAIRS)
    assert_same(weights_of(trained, tmp_path / "after"), before)


def schedule(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


@pytest.mark.parametrize(("stage", "bf16"), [(0, False), (1, False), (2, False), (3, False), (1, True), (3, True)])
@pytest.mark.parametrize("side", ["gradient", "loss"])
def test_a_skipped_step_leaves_no_trace(tmp_path, caplog, stage, bf16, side):
    """Two good steps with bad ones between them are the two good steps alone, with all draws given."""
    draws = [full_draw(len(p.chosen_ids), len(p.rejected_ids)) for p in PAIRS]
    settings = {"non_finite": "skip", "non_finite_limit": 2, "bf16": bf16, "learning_rate": 0.01}
    runs = {}
    for name, num_bad in (("plain", 0), ("spoilt", 2)):
        lm = tiny_llama().bfloat16() if bf16 else None
        trained = engine(stage, lm, lr_scheduler=schedule, **settings)
        lines = [trained.train_step(PAIRS, draws)]
        hook = spoil(trained, side)
        lines += [trained.train_step(PAIRS, draws) for _ in range(num_bad)]
        hook.remove()
        lines.append(trained.train_step(PAIRS, draws))
        runs[name] = lines, weights_of(trained, tmp_path / name)
    plain, spoilt = runs["plain"][0], runs["spoilt"][0]
    assert_same(runs["spoilt"][1], runs["plain"][1])
    assert [line["steps/skipped"] for line in spoilt] == [0, 1, 2, 2]
    for key in ("loss", "grad_norm", "learning_rate"):
        assert [spoilt[0][key], spoilt[3][key]] == [plain[0][key], plain[1][key]], key
    assert all(np.isnan(line["grad_norm"]) for line in spoilt[1:3])
    assert "optimizer step 2" in caplog.text
    assert ": 0, 1. The step is skipped, number 1 in a row." in caplog.text


def test_too_many_skipped_steps_in_a_row_end_the_run():
    trained = engine(1, non_finite="skip", non_finite_limit=1)
    hook = spoil(trained, "loss")
    trained.train_step(PAIRS)
    hook.remove()
    trained.train_step(PAIRS)
    spoil(trained, "loss")
    trained.train_step(PAIRS)
    with pytest.raises(ds_stochdpo.NonFiniteError, match="number 2 in a row, more than non_finite_limit 1 allows"):
        trained.train_step(PAIRS)


def test_a_loss_that_is_not_finite_stops_an_evaluation():
    lm = tiny_llama()
    lm.model.norm.weight.data.fill_(float("inf"))
    with pytest.raises(ds_stochdpo.NonFiniteError, match="evaluation after optimizer step 0"):
        engine(0, lm).evaluate(PAIRS)


def test_draws_of_other_pairs_are_refused():
    trained = engine(0)
    draws = [full_draw(len(p.chosen_ids), len(p.rejected_ids)) for p in PAIRS]
    with pytest.raises(ds_stochdpo.ConfigError, match="2 pairs but 1 draws"):
        trained.train_step(PAIRS, draws[:1])
    with pytest.raises(ds_stochdpo.ConfigError, match="in the order of the pairs"):
        trained.train_step(PAIRS, draws[::-1])
    with pytest.raises(ds_stochdpo.ConfigError, match="no pairs on any rank"):
        trained.train_step([], [])
    with pytest.raises(ds_stochdpo.ConfigError, match="no pairs on any rank"):
        trained.evaluate([])


def test_a_model_in_another_precision_than_the_settings_is_refused():
    with pytest.raises(ds_stochdpo.ConfigError, match=r"weights are torch.bfloat16, but bf16 is false"):
        engine(1, tiny_llama().bfloat16())
    with pytest.raises(ds_stochdpo.ConfigError, match=r"weights are torch.float16, but bf16 is true"):
        engine(1, tiny_llama().half(), bf16=True)


def test_a_cache_of_other_tokens_or_of_zeros_is_not_taken(tmp_path, caplog):
    file = tmp_path / "folder" / "cache.safetensors"
    logps = np.linspace(-3, -1, sum(len(p.chosen_ids) + len(p.rejected_ids) for p in PAIRS), dtype=np.float32)
    _write_cache(file, PAIRS, logps)
    assert np.array_equal(_read_cache(file, PAIRS), logps)
    assert [p.name for p in file.parent.iterdir()] == [file.name]
    other = copy.deepcopy(PAIRS)
    other[0].chosen_ids[0] += 1
    assert fingerprint_of(other) != fingerprint_of(PAIRS)
    assert _read_cache(file, other) is None
    _write_cache(file, PAIRS, np.zeros_like(logps))
    assert _read_cache(file, PAIRS) is None
    assert _read_cache(tmp_path, PAIRS) is None
    _write_cache(file / "below" / "a_file", PAIRS, logps)
    assert "cannot be written" in caplog.text


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"prompt_ids": np.zeros(0, np.int64)}, "prompt_ids must be"),
        ({"chosen_ids": [1, 2]}, "chosen_ids must be"),
        ({"rejected_ids": np.ones(2)}, "rejected_ids must be"),
        ({"chosen_ref_logps": np.zeros(1, np.float32)}, "2 chosen tokens, but 1 reference"),
    ],
)
def test_a_pair_that_makes_no_sense_is_refused(changes, match):
    ids = np.array([5, 6])
    fields = {"pair_id": 3, "prompt_ids": ids, "chosen_ids": ids, "rejected_ids": ids + 1, **changes}
    with pytest.raises(ds_stochdpo.DataError, match=f"pair 3: {match}" if "tokens" not in match else match):
        ds_stochdpo.PreferencePair(**fields)
