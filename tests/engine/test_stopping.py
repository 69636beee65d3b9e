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


def engine(stage=3, lm=None, **settings):
    ds = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    config = ds_stochdpo.StochDPOConfig(per_device_train_batch_size=2, **settings)
    return ds_stochdpo.initialize(model=lm or tiny_llama(), config=config, deepspeed=ds)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_that_is_not_finite_stops_the_engine(tmp_path, stage):
    trained = engine(stage)
    trained.export(tmp_path / "before")
    spoil = trained.module.lm.get_output_embeddings().register_full_backward_hook(
        lambda module, inputs, outputs: (inputs[0] * float("nan"), *inputs[1:])
    )
    with pytest.raises(ds_stochdpo.StochDPOError, match="optimizer step 1: the gradient is not finite"):
        trained.train_step(PAIRS)
    spoil.remove()
    with pytest.raises(ds_stochdpo.StochDPOError, match="has stopped"):
        trained.train_step(PAIRS)
    trained.export(tmp_path / "after")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("before", "after"))
    for name, value in before.items():
        assert torch.equal(after[name], value), name


def test_a_loss_that_is_not_finite_stops_training_and_evaluation():
    lm = tiny_llama()
    lm.model.norm.weight.data.fill_(float("inf"))
    broken = engine(0, lm)
    with pytest.raises(ds_stochdpo.StochDPOError, match="evaluation after optimizer step 0"):
        broken.evaluate(PAIRS)
    with pytest.raises(
        ds_stochdpo.StochDPOError, match=r"optimizer step 1: the loss is nan.*pairs of this rank: \[0, 1\]"
    ):
        broken.train_step(PAIRS)


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
