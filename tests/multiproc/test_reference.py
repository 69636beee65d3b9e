"""Reference log-probs on 2 ranks that are 2 nodes with a cache each: values, reuse, damage, refusal."""

import shutil

import numpy as np
import pytest

from tests.multiproc import cases, harness
from tests.oracle import branch_logps, random_pairs

pytestmark = pytest.mark.multiproc

LENGTHS = [(6, 19, 5), (4, 2, 17), (3, 1, 6), (1, 1, 1), (9, 3, 11), (2, 7, 4), (5, 8, 8)]
ORDER = [4, 0, 6, 2, 5, 1, 3]


def unscored_pairs(seed=7):
    pairs = random_pairs(LENGTHS, cases.VOCAB, seed=seed, shared=2)
    # Neither by id nor by length.
    return [pairs[i] for i in ORDER]


def damage(kind, file):
    """Spoil a cache file the way a full disk, a killed process or another data set would."""
    content = file.read_bytes()
    if kind == "truncated":
        file.write_bytes(content[: len(content) // 2])
    elif kind == "empty":
        file.write_bytes(b"")
    elif kind == "overwritten":
        file.write_bytes(b"no safetensors file at all, but long enough to have a header")
    else:
        from safetensors import safe_open
        from safetensors.numpy import save_file

        with safe_open(file, framework="np") as stored:
            logps, metadata = stored.get_tensor("logps"), stored.metadata()
        if kind == "not finite":
            logps[3] = np.nan
        elif kind == "all zero":
            logps[:] = 0
        elif kind == "other pairs":
            metadata["pairs"] = metadata["pairs"][::-1]
        elif kind == "other format":
            metadata["format"] = "1"
        name = "something" if kind == "other tensors" else "logps"
        save_file({name: logps}, file, metadata=metadata)


DAMAGES = (
    "truncated", "empty", "overwritten", "not finite", "all zero", "other pairs", "other format", "other tensors"
)  # fmt: skip


def reference_runs(_, folder):
    """Worker: returns the calls of the model and the values of each `add_reference`."""
    import ds_stochdpo
    from ds_stochdpo.engine import add_reference, process_group
    from ds_stochdpo.errors import ConfigError

    done = {}
    with process_group() as ranks:
        engine = ds_stochdpo.initialize(
            model=cases.model(),
            config=ds_stochdpo.StochDPOConfig(
                **cases.PRUNED, beta=cases.BETA, per_device_train_batch_size=4, per_device_eval_batch_size=2
            ),
            deepspeed=cases.deepspeed_json(3, cases.SGD),
        )
        calls = []
        engine.module.register_forward_pre_hook(lambda *_: calls.append(1))
        file = folder / f"node{ranks.rank}" / "reference.safetensors"

        def record(name, cache_file=file):
            calls.clear()
            try:
                pairs = add_reference(engine, unscored_pairs(), cache_file)
            except ConfigError as error:
                done[name] = {"calls": len(calls), "error": str(error)}
                return None
            values = [(p.pair_id, p.chosen_ref_logps, p.rejected_ref_logps) for p in pairs]
            done[name] = {"calls": len(calls), "values": values}
            return pairs

        record("no cache", None)
        assert not file.exists()
        record("first")
        record("second")
        if ranks.rank == 1:
            file.unlink()
        record("one rank without its file")
        for kind in DAMAGES:
            if ranks.rank == 0:
                damage(kind, file)
            record(kind)
            record(f"after {kind}")
        pairs = record("before training")
        engine.train_step(pairs[ranks.rank :: 2])
        record("trained, cached")
        record("trained, no cache", None)
        if ranks.rank == 1:
            file.unlink()
        record("trained, one rank without its file")
        if ranks.rank == 1:
            shutil.copy(folder / "node0" / "reference.safetensors", file)
        record("trained, restored")
    return done


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    # Both ranks are the first of their node, so each of them keeps a cache file.
    results, _ = harness.run(reference_runs, 2, tmp_path_factory.mktemp("reference"), env={"LOCAL_RANK": "0"})
    return results


@pytest.fixture(scope="module")
def expected():
    import torch

    lm = cases.model().eval()
    with torch.no_grad():
        return [
            (p.pair_id, *(branch_logps(lm, p.prompt_ids, r).numpy() for r in (p.chosen_ids, p.rejected_ids)))
            for p in unscored_pairs()
        ]


def test_values_are_the_models_own_in_the_order_of_the_pairs(ranks, expected):
    assert [pair_id for pair_id, _, _ in expected] == ORDER
    worst = 0.0
    for rank in ranks:
        for run in (r for r in rank.values() if "values" in r):
            assert [v[0] for v in run["values"]] == ORDER
            for got, want in zip(run["values"], expected, strict=True):
                for g, w in zip(got[1:], want[1:], strict=True):
                    assert g.shape == w.shape
                    assert g.dtype == np.float32
                    worst = max(worst, float(np.abs(g - w).max()))
    print("largest difference from the model's own forward, nats:", worst)
    assert worst < 1e-5


def test_a_cache_is_reused_without_running_the_model(ranks):
    for rank in ranks:
        assert rank["no cache"]["calls"] > 0
        assert rank["first"]["calls"] > 0
        assert rank["second"]["calls"] == 0
        assert_equal(rank["second"], rank["first"])
        assert_equal(rank["first"], ranks[0]["first"])


@pytest.mark.parametrize("kind", ["one rank without its file", *DAMAGES])
def test_one_bad_cache_makes_all_ranks_compute(ranks, kind):
    for rank in ranks:
        assert rank[kind]["calls"] == rank["first"]["calls"]
        assert_equal(rank[kind], rank["first"])
        if kind in DAMAGES:
            # The bad file was replaced.
            assert rank[f"after {kind}"]["calls"] == 0


def test_a_trained_policy_never_becomes_the_reference(ranks):
    for rank in ranks:
        assert rank["trained, cached"]["calls"] == 0
        assert_equal(rank["trained, cached"], rank["first"])
        for name in ("trained, no cache", "trained, one rank without its file"):
            assert rank[name]["calls"] == 0
            assert "has already been trained" in rank[name]["error"]
        assert_equal(rank["trained, restored"], rank["first"])


def assert_equal(run, other):
    for got, want in zip(run["values"], other["values"], strict=True):
        assert got[0] == want[0]
        assert all(np.array_equal(g, w) for g, w in zip(got[1:], want[1:], strict=True))
