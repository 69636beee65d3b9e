"""A reference model beside the policy, on 2 ranks: online equals cached, and it is sharded and never trained."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from tests.multiproc import cases, harness
from tests.oracle import branch_logps, relative_error
from tests.tiny import tiny_gpt2, tiny_llama

pytestmark = pytest.mark.multiproc

REFERENCES = ("same", "other", "family")


def reference_model(name):
    """The policy's own weights, other weights, or another family."""
    if name == "family":
        return tiny_gpt2(cases.VOCAB, seed=3, initializer_range=0.2)
    if name == "other":
        return tiny_llama(cases.VOCAB, seed=3, num_hidden_layers=2, initializer_range=0.2)
    return cases.model()


def train_with_reference(_, folder):
    """Worker: the same steps under `cached` and `online`, at ZeRO-3 and, for one reference, at ZeRO-1."""
    import ds_stochdpo
    from ds_stochdpo.engine import process_group

    done = {}
    with process_group() as ranks:
        for stage, name in [(3, n) for n in REFERENCES] + [(1, "other")]:
            for kind in ("cached", "online"):
                config = ds_stochdpo.StochDPOConfig(
                    **cases.PRUNED, beta=0.1, per_device_train_batch_size=2, reference=kind
                )
                engine = ds_stochdpo.initialize(
                    model=cases.model(),
                    ref_model=reference_model(name),
                    config=config,
                    deepspeed=cases.deepspeed_json(stage, cases.SGD),
                )
                shards = [(p.ds_numel, p.numel(), p.ds_tensor.numel()) for p in engine.reference.module.parameters()]
                batches = cases.step_pairs(refs=False)
                if kind == "cached":
                    flat = [pair for batch in batches for pair in batch]
                    scored = ds_stochdpo.add_reference(engine, flat)
                    size = len(batches[0])
                    batches = [scored[i : i + size] for i in range(0, len(scored), size)]
                    engine.reference.release()
                    engine.reference = None
                metrics = [engine.train_step(cases.shares(pairs, 4)[ranks.rank]) for pairs in batches]
                evaluation = engine.evaluate(cases.shares(batches[0], 4)[ranks.rank])
                engine.export(folder / f"{stage}-{name}-{kind}")
                done[stage, name, kind] = {
                    "shards": shards,
                    "metrics": metrics,
                    "evaluation": evaluation,
                    "logps": [p.chosen_ref_logps for p in batches[0]] if kind == "cached" else None,
                }
    return done


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return harness.run(train_with_reference, 2, tmp_path_factory.mktemp("online"), None)


CASES = [(3, name) for name in REFERENCES] + [(1, "other")]


@pytest.mark.parametrize(("stage", "name"), CASES)
def test_online_and_cached_give_the_same_losses_and_weights(trained, stage, name):
    results, job = trained
    cached, online = (results[0][stage, name, kind] for kind in ("cached", "online"))
    for one, other in zip(cached["metrics"], online["metrics"], strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-6)
        # Rewards sum fp32 log-probs with weights up to 8, so their rounding is that much larger.
        for key in ("rewards/chosen", "rewards/rejected", "rewards/margins", "grad_norm", "logps/chosen"):
            assert other[key] == pytest.approx(one[key], rel=1e-5, abs=1e-5), key
    assert online["evaluation"] == pytest.approx(cached["evaluation"], rel=1e-5, abs=2e-6)
    weights = [load_file(job.folder / f"{stage}-{name}-{kind}" / "model.safetensors") for kind in ("cached", "online")]
    assert relative_error(weights[1], weights[0]) < 1e-6
    start = dict(cases.model().named_parameters())
    assert relative_error(weights[0], {k: v.detach() for k, v in start.items()}) > 1e-3


def test_the_margin_is_zero_at_step_0_with_the_policy_as_reference(trained):
    results, _ = trained
    for kind in ("cached", "online"):
        assert results[0][3, "same", kind]["metrics"][0]["rewards/margins"] == pytest.approx(0.0, abs=2e-6)
        assert abs(results[0][3, "other", kind]["metrics"][0]["rewards/margins"]) > 1e-2


@pytest.mark.parametrize(("stage", "name"), CASES)
def test_the_reference_is_sharded_at_rest(trained, stage, name):
    for result in trained[0]:
        shards = result[stage, name, "online"]["shards"]
        assert sum(resident for _, resident, _ in shards) == 0
        assert sum(own for _, _, own in shards) <= 0.6 * sum(whole for whole, _, _ in shards)


@pytest.mark.parametrize("name", REFERENCES)
def test_cached_log_probs_are_those_of_the_reference_model(trained, name):
    lm = reference_model(name).eval()
    for pair, got in zip(cases.step_pairs(refs=False)[0], trained[0][0][3, name, "cached"]["logps"], strict=True):
        with torch.no_grad():
            want = branch_logps(lm, pair.prompt_ids, pair.chosen_ids)
        torch.testing.assert_close(torch.from_numpy(got), want, rtol=1e-5, atol=1e-5)


def test_the_run_needs_what_the_setting_says(single_process):
    import ds_stochdpo

    online = ds_stochdpo.StochDPOConfig(reference="online")
    with pytest.raises(ds_stochdpo.ConfigError, match="needs ref_model"):
        ds_stochdpo.initialize(model=cases.model(), config=online)
    none = dataclasses.replace(online, reference="none")
    with pytest.raises(ds_stochdpo.ConfigError, match="reference is none"):
        ds_stochdpo.initialize(model=cases.model(), ref_model=cases.model(), config=none)
