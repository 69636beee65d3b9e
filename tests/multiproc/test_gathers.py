"""Under ZeRO-3 pruning adds no communication: gathers, bytes, traces and gathered memory of a step, counted."""

import dataclasses

import pytest

from tests.multiproc import cases, harness

pytestmark = pytest.mark.multiproc

LAYERS = 4
# DeepSpeed records its trace in the second micro-step and follows it from the third on.
WARM_UP = 3
MEASURED = 3
EXACT = {"branch": "both"}


@dataclasses.dataclass(frozen=True)
class Run:
    """One series of optimizer steps under the meter."""

    pruning: dict
    tie: bool = False
    kind: str = "llama"
    checkpointing: bool = False
    mlp_tile: int | None = None
    micro_batches: int = 1
    # Deliberate faults, to see that the meter notices them.
    calls: str = "once"
    zero: dict = dataclasses.field(default_factory=dict)
    # Evaluate before each measured step.
    evaluates: bool = False


RUNS = {
    "exact-untied": Run(EXACT),
    "pruned-untied": Run(cases.PRUNED),
    "pruned-untied-recompute": Run(cases.PRUNED, checkpointing=True),
    "exact-tied": Run(EXACT, tie=True),
    "pruned-tied": Run(cases.PRUNED_OTHERWISE, tie=True),
    "pruned-tied-recompute-tiled": Run(cases.PRUNED, tie=True, checkpointing=True, mlp_tile=5),
    "exact-untied-2": Run(EXACT, micro_batches=2),
    "pruned-untied-2": Run(cases.PRUNED, micro_batches=2),
    "pruned-qwen3_moe": Run(cases.PRUNED, kind="qwen3_moe"),
    "pruned-mixtral-recompute": Run(cases.PRUNED, kind="mixtral", checkpointing=True),
    "pruned-untied-evaluated": Run(cases.PRUNED, evaluates=True),
}
FAULTS = {
    "no-grad-then-grad": Run(cases.PRUNED, calls="before"),
    "grad-then-no-grad": Run(cases.PRUNED, calls="after"),
    "keeps-parameters": Run(cases.PRUNED, zero={"stage3_max_reuse_distance": 10**9}),
}


class CalledTwice:
    """A DeepSpeed engine whose forward runs the model once more without gradient, as a two-pass design would."""

    def __init__(self, engine, order):
        self._engine = engine
        self._order = order

    def __call__(self, layout):
        import torch

        if self._order == "after":
            scores = self._engine(layout)
        with torch.no_grad():
            self._engine(layout)
        return scores if self._order == "after" else self._engine(layout)

    def __getattr__(self, name):
        return getattr(self._engine, name)


def measure(runs, folder):
    """Worker: run each series; returns per run the readings, traces and module sizes."""
    import ds_stochdpo
    from ds_stochdpo.engine import process_group
    from tests.multiproc.meter import GatherMeter

    done = {}
    with process_group() as ranks:
        for name, run in runs.items():
            lm = cases.model(run.kind, tie=run.tie, layers=LAYERS)
            # Before the model is partitioned and its classes are changed.
            sizes = module_sizes(lm)
            engine = ds_stochdpo.initialize(
                model=lm,
                config=ds_stochdpo.StochDPOConfig(
                    **run.pruning,
                    beta=cases.BETA,
                    per_device_train_batch_size=-(-4 // run.micro_batches),
                    gradient_checkpointing=run.checkpointing,
                    mlp_tile_tokens=run.mlp_tile,
                ),
                deepspeed=cases.deepspeed_json(3, cases.SGD, **run.zero),
            )
            coordinator = engine.deepspeed.optimizer._get_param_coordinator()
            if run.calls != "once":
                engine.deepspeed = CalledTwice(engine.deepspeed, run.calls)
            record = {"sizes": sizes, "readings": [], "evaluations": [], "complete": [], "kept": [], "invalidations": 0}
            with GatherMeter().watching() as meter:
                for step, pairs in enumerate(cases.step_pairs(steps=WARM_UP + MEASURED)):
                    own = cases.shares(pairs, 4)[ranks.rank]
                    is_measured = step >= WARM_UP
                    if run.evaluates and is_measured:
                        engine.evaluate(own[:1])
                        record["evaluations"].append(meter.take())
                    draws = engine.draw(pairs)
                    engine.train_step(own)
                    reading = meter.take()
                    record["invalidations"] += reading.invalidations
                    if is_measured:
                        record["kept"].append(tuple(d.kept for d in draws))
                        record["readings"].append(reading)
                        record["complete"].append(coordinator.is_complete_trace())
            done[name] = record
    return done


def module_sizes(lm):
    """Bytes of each parameterised module as the ranks gather it: every tensor filled up to a multiple of 2 ranks."""
    base = lm.base_model
    modules = {
        "embedding": lm.get_input_embeddings(),
        **{f"layer {i}": layer for i, layer in enumerate(base.layers)},
        "norm": base.norm,
        "head": lm.get_output_embeddings(),
    }
    found = {id(p) for m in modules.values() for p in m.parameters()}
    assert found == {id(p) for p in lm.parameters()}
    return {n: sum(-(-p.numel() // 2) * 2 * 4 for p in m.parameters()) for n, m in modules.items()}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return harness.run(measure, 2, tmp_path_factory.mktemp("gathers"), {**RUNS, **FAULTS})


@pytest.mark.parametrize("name", RUNS)
def test_gathers_are_the_minimum(measured, name):
    results, _ = measured
    for record in (rank[name] for rank in results):
        assert len(record["sizes"]) == LAYERS + 3
        # Each parameterised module once in the forward and once in the backward pass of a micro-batch.
        passes = 2 * RUNS[name].micro_batches
        want = (passes * len(record["sizes"]), passes * sum(record["sizes"].values()))
        print(name, want, [r.peak_bytes for r in record["readings"]], bound(record["sizes"]), record["sizes"])
        assert [(r.gathers, r.gathered_bytes) for r in record["readings"]] == [want] * MEASURED


@pytest.mark.parametrize(
    ("pruned", "exact"),
    [
        ("pruned-untied", "exact-untied"),
        ("pruned-tied", "exact-tied"),
        ("pruned-untied-2", "exact-untied-2"),
    ],
)
def test_a_pruned_step_gathers_what_an_exact_step_gathers(measured, pruned, exact):
    results, _ = measured
    for record in results:
        counts = [[(r.gathers, r.gathered_bytes) for r in record[n]["readings"]] for n in (pruned, exact)]
        assert counts[0] == counts[1]


@pytest.mark.parametrize("name", RUNS)
def test_no_trace_is_invalidated_by_changing_draws(measured, name):
    results, _ = measured
    for record in (rank[name] for rank in results):
        assert all(record["complete"])
        assert record["invalidations"] == 0
        readings = record["readings"] + record["evaluations"]
        assert [(r.invalidations, r.broadcasts) for r in readings] == [(0, 0)] * len(readings)
        if RUNS[name].pruning["branch"] == "single":
            assert len(set(record["kept"])) > 1


def test_deepspeed_warns_of_exactly_the_invalidations_that_were_counted(measured):
    results, job = measured
    counted = sum(record["invalidations"] for record in results[0].values())
    assert job.outputs[0].count("Invalidate trace cache") == counted > 0


def test_an_evaluation_gathers_each_module_once(measured):
    results, _ = measured
    for record in (rank["pruned-untied-evaluated"] for rank in results):
        sizes = record["sizes"]
        want = (len(sizes), sum(sizes.values()))
        assert [(r.gathers, r.gathered_bytes) for r in record["evaluations"]] == [want] * MEASURED


@pytest.mark.parametrize("name", RUNS)
def test_at_most_one_layer_and_the_embedding_are_gathered_at_once(measured, name):
    results, _ = measured
    for record in (rank[name] for rank in results):
        readings = record["readings"] + record["evaluations"]
        assert 0 < max(r.peak_bytes for r in readings) <= bound(record["sizes"])


def bound(sizes):
    return max(sizes[f"layer {i}"] for i in range(LAYERS)) + max(sizes["embedding"], sizes["head"])


@pytest.mark.parametrize("name", ["no-grad-then-grad", "grad-then-no-grad"])
def test_the_meter_sees_a_second_call_of_the_model(measured, name):
    results, _ = measured
    for record in (rank[name] for rank in results):
        least = 2 * len(record["sizes"])
        assert all(r.gathers > least for r in record["readings"]), [r.gathers for r in record["readings"]]
        assert any(r.invalidations for r in record["readings"])
        assert any(r.broadcasts for r in record["readings"])


@pytest.mark.parametrize("name", ["grad-then-no-grad", "keeps-parameters"])
def test_the_meter_sees_parameters_that_stay_gathered(measured, name):
    results, _ = measured
    for record in (rank[name] for rank in results):
        print(name, [r.peak_bytes for r in record["readings"]], bound(record["sizes"]))
        assert max(r.peak_bytes for r in record["readings"]) > bound(record["sizes"])
