"""A rank that fails ends the job: no rank is left waiting in a collective."""

import pytest

from tests.multiproc import cases, harness

pytestmark = pytest.mark.multiproc

# The ranks meet after import and initialisation; this bounds all of it and the time to notice the failure.
LIMIT_S = 90


def fail_on_one_rank(where, folder):
    """Worker: one good step, then rank 1 fails before a collective or in the middle of a forward."""
    import ds_stochdpo
    from ds_stochdpo.engine import process_group

    with process_group() as ranks:
        engine = ds_stochdpo.initialize(
            model=cases.model(layers=1),
            config=ds_stochdpo.StochDPOConfig(**cases.PRUNED, per_device_train_batch_size=2),
            deepspeed=cases.deepspeed_json(3, cases.SGD),
        )
        (pairs,) = cases.step_pairs(steps=1)
        own = cases.shares(pairs, 4)[ranks.rank]
        engine.train_step(own)
        print("first step done", flush=True)
        if ranks.rank == 1 and where == "data":
            # Pairs without reference log-probs are refused before the ranks meet.
            own = cases.shares(cases.step_pairs(steps=1, refs=False)[0], 4)[1]
        if ranks.rank == 1 and where == "forward":
            engine.module.lm.base_model.layers[0].register_forward_pre_hook(_break)
        engine.train_step(own)


def _break(*_):
    raise RuntimeError("deliberately broken layer")


@pytest.mark.parametrize(
    ("where", "message", "debug"),
    [
        ("data", "has no reference log-probs", "OFF"),
        ("forward", "deliberately broken layer", "DETAIL"),
    ],
)
def test_a_rank_that_raises_ends_the_job(tmp_path, where, message, debug):
    job = harness.start(fail_on_one_rank, 2, tmp_path, where, limit_s=LIMIT_S, env={"TORCH_DISTRIBUTED_DEBUG": debug})
    assert all("first step done" in output for output in job.outputs), job.report()
    # Killed ranks have a negative code and no end: both must have ended by themselves, with an error.
    assert job.codes == [1, 1], job.report()
    print(where, "seconds between the ends of the two ranks:", max(job.seconds) - min(job.seconds))
    assert max(job.seconds) - min(job.seconds) < harness.GRACE_S
    assert message in job.outputs[1]
    assert message not in job.outputs[0]
