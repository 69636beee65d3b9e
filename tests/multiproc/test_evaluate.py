"""Metrics and draws do not depend on batch size or world size; ranks with other settings are caught."""

import pytest
import torch
from safetensors.torch import load_file

from tests.multiproc import cases, harness
from tests.oracle import padded_dpo_loss

pytestmark = pytest.mark.multiproc

EVAL_LENGTHS = [(6, 19, 5), (4, 2, 17), (3, 1, 6), (1, 1, 1), (9, 3, 11)]
STEPS = 3
SETTINGS = {**cases.PRUNED_OTHERWISE, "branch_balance": "balanced", "beta": cases.BETA, "seed": 11}


def build(**settings):
    import ds_stochdpo

    return ds_stochdpo.initialize(
        model=cases.model(),
        config=ds_stochdpo.StochDPOConfig(**{**SETTINGS, "per_device_train_batch_size": 2, **settings}),
        deepspeed=cases.deepspeed_json(3, cases.SGD),
    )


def eval_pairs():
    return cases.step_pairs(EVAL_LENGTHS, steps=1)[0]


def timeless(metrics):
    return {k: v for k, v in metrics.items() if k.split("/")[0] not in ("time", "memory")}


def draw_values(draws):
    def branch(d):
        return d.prefix_tokens, d.positions.tolist(), d.weights.tolist()

    return [(d.kept, d.kept_prob, branch(d.chosen), branch(d.rejected)) for d in draws]


def evaluate_and_train(_, folder):
    """Worker, for 1 or 2 ranks."""
    from ds_stochdpo.engine import process_group
    from ds_stochdpo.errors import ConfigError, LockstepError

    done = {"evaluations": {}, "draws": [], "train": {}}
    with process_group() as ranks:
        share = slice(ranks.rank, None, ranks.world_size)
        for batch in (1, 4):
            engine = build(per_device_eval_batch_size=batch)
            done["evaluations"][f"batch {batch}"] = engine.evaluate(eval_pairs()[share])
        # All pairs on the last rank, in falling order.
        is_last = ranks.rank == ranks.world_size - 1
        done["evaluations"]["last rank only"] = engine.evaluate(eval_pairs()[::-1] if is_last else [])
        for evaluates in (False, True):
            engine = build(per_device_eval_batch_size=2)
            metrics = []
            for pairs in cases.step_pairs(steps=STEPS):
                if evaluates:
                    engine.evaluate(eval_pairs()[share])
                done["draws"].append(draw_values(engine.draw(pairs)))
                metrics.append(timeless(engine.train_step(pairs[share])))
            name = "evaluated" if evaluates else "alone"
            done["train"][name] = metrics
            engine.export(folder / name)
        try:
            engine.evaluate([])
        except ConfigError as error:
            done["nothing to evaluate"] = str(error)
        engine = build(seed=11 + ranks.rank)
        try:
            engine.train_step(cases.step_pairs(steps=1)[0][share])
        except LockstepError as error:
            done["mismatch"] = str(error)
        done["steps after the mismatch"] = engine.step
    return done


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return harness.run(evaluate_and_train, 1, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return harness.run(evaluate_and_train, 2, tmp_path_factory.mktemp("two"))


def close(metrics):
    return pytest.approx(metrics, rel=1e-5, abs=1e-6)


def test_evaluation_depends_on_neither_batch_size_nor_world_size(one, two):
    want = one[0][0]["evaluations"]["batch 1"]
    assert want["loss"] == pytest.approx(padded_dpo_loss(cases.model(), eval_pairs(), beta=cases.BETA).item(), rel=1e-5)
    assert {"loss", "rewards/margins", "logps/chosen"} <= want.keys()
    for results, _ in (one, two):
        for rank in results:
            assert len(rank["evaluations"]) == 3
            for name, metrics in rank["evaluations"].items():
                assert metrics == close(want), name
            assert "no pairs" in rank["nothing to evaluate"]
    # An exact comparison over ranks: every rank reports the same numbers.
    assert two[0][0]["evaluations"] == two[0][1]["evaluations"]


def test_draws_and_training_metrics_depend_on_the_global_pairs_only(one, two):
    (alone,), _ = one
    kept = {values[0] for step in alone["draws"] for values in step}
    assert kept == {"chosen", "rejected"}
    for rank in two[0]:
        assert rank["draws"] == alone["draws"]
        for want, got in zip(alone["train"]["alone"], rank["train"]["alone"], strict=True):
            assert got == close(want)
            counts = [k for k in want if k.startswith("tokens/")]
            assert len(counts) == 4
            assert [got[k] for k in counts] == [want[k] for k in counts]


@pytest.mark.parametrize("world", ["one", "two"])
def test_evaluation_between_steps_changes_nothing(request, world):
    results, job = request.getfixturevalue(world)
    for rank in results:
        assert rank["train"]["evaluated"] == rank["train"]["alone"]
        assert rank["train"]["alone"][0]["loss"] != rank["train"]["alone"][-1]["loss"]
    weights = [load_file(job.folder / name / "model.safetensors") for name in ("evaluated", "alone")]
    assert all(torch.equal(weights[0][n], weights[1][n]) for n in weights[1])


def test_ranks_with_different_seeds_are_stopped(one, two):
    for rank in two[0]:
        assert "start every rank with the same command" in rank["mismatch"]
        assert rank["steps after the mismatch"] == 0
    # One rank alone cannot disagree, so the check can also be silent.
    assert "mismatch" not in one[0][0]
    assert one[0][0]["steps after the mismatch"] == 1
