"""Weights after 4 optimizer steps on 2 ranks equal those of one process without DeepSpeed and without the engine."""

import dataclasses
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.multiproc import cases, harness
from tests.oracle import relative_error

pytestmark = pytest.mark.multiproc


@dataclasses.dataclass(frozen=True)
class Case:
    """One training run, done by 2 ranks and by the plain loop."""

    stage: int
    tie: bool = False
    kind: str = "llama"
    optimizer: str = "SGD"
    pruning: str = "PRUNED"
    gives_draws: bool = True
    checkpointing: bool = False
    share_prompt: bool = True
    # Pairs of rank 0 in each of the 4 steps; the others go to rank 1.
    num_first: tuple = (4, 4, 4, 4)
    micro_pairs: int = 2
    max_tokens: int | None = None
    # Fewer tokens than a lane of rank 0 has, more than some of rank 1.
    mlp_tile: int | None = None
    # Elements that ZeRO collects before it adds them up over the ranks: whatever is first in them on each rank.
    bucket: int = 500_000_000

    @property
    def settings(self):
        return {
            **getattr(cases, self.pruning),
            "beta": cases.BETA,
            "seed": 3,
            "per_device_train_batch_size": self.micro_pairs,
            "gradient_checkpointing": self.checkpointing,
            "share_prompt": self.share_prompt,
            "max_tokens_per_micro_batch": self.max_tokens,
            "mlp_tile_tokens": self.mlp_tile,
        }


CASES = {
    "z3-untied-sgd": Case(3),
    "z3-tied-sgd-recompute": Case(3, tie=True, checkpointing=True, pruning="PRUNED_OTHERWISE"),
    "z3-untied-adamw-recompute-engine-draws": Case(3, optimizer="ADAMW", checkpointing=True, gives_draws=False),
    "z3-tied-adamw": Case(3, tie=True, optimizer="ADAMW", pruning="PRUNED_OTHERWISE", share_prompt=False),
    "z3-gpt2-sgd": Case(3, tie=True, kind="gpt2", gives_draws=False, pruning="PRUNED_OTHERWISE"),
    "z3-gemma2-sgd-recompute": Case(3, tie=True, kind="gemma2", checkpointing=True),
    "z3-granite-adamw": Case(3, tie=True, kind="granite", optimizer="ADAMW", pruning="PRUNED_OTHERWISE"),
    "z3-qwen3_moe-sgd": Case(3, kind="qwen3_moe", gives_draws=False, pruning="PRUNED_OTHERWISE"),
    "z3-mixtral-sgd-recompute-tiled-empty-rank": Case(
        3, kind="mixtral", checkpointing=True, mlp_tile=5, num_first=(8, 4, 0, 8)
    ),
    "z3-phi3-sgd-tiled": Case(3, kind="phi3", gives_draws=False, mlp_tile=5),
    "z3-olmo2-sgd-recompute": Case(3, kind="olmo2", checkpointing=True, pruning="PRUNED_OTHERWISE"),
    "z3-smollm3-adamw": Case(3, tie=True, kind="smollm3", optimizer="ADAMW"),
    "z3-gemma3-sgd": Case(3, tie=True, kind="gemma3_text", pruning="PRUNED_OTHERWISE"),
    "z1-tied-sgd-recompute": Case(1, tie=True, checkpointing=True),
    "z2-untied-sgd-tiled": Case(2, mlp_tile=5, bucket=1500),
    "z2-tied-sgd-recompute-tiled-empty-rank": Case(
        2, tie=True, checkpointing=True, mlp_tile=25, num_first=(8, 4, 0, 8), pruning="PRUNED_OTHERWISE"
    ),
    "z3-untied-sgd-tiled-small-buckets": Case(3, mlp_tile=25, bucket=1500),
    "z3-mixtral-sgd-small-buckets": Case(3, kind="mixtral", bucket=1500, num_first=(8, 4, 0, 8)),
    "z2-qwen3_moe-sgd-recompute-tiled": Case(
        2, kind="qwen3_moe", checkpointing=True, mlp_tile=5, num_first=(8, 4, 0, 8)
    ),
    "z2-untied-adamw-engine-draws": Case(2, optimizer="ADAMW", gives_draws=False, pruning="PRUNED_OTHERWISE"),
    "z1-untied-sgd-tiled": Case(1, gives_draws=False, pruning="PRUNED_OTHERWISE", mlp_tile=5),
    "z3-empty-rank": Case(3, num_first=(8, 4, 0, 8), micro_pairs=3, checkpointing=True),
    "z1-empty-rank": Case(1, num_first=(8, 0, 8, 4), micro_pairs=3, gives_draws=False),
    "z3-token-budget": Case(3, tie=True, micro_pairs=4, max_tokens=30),
    "z2-token-budget": Case(2, micro_pairs=4, max_tokens=30),
}


def train_on_ranks(names, folder):
    """Worker: run the cases in one process group."""
    import ds_stochdpo
    from ds_stochdpo.engine import process_group

    done = {}
    with process_group() as ranks:
        for name in names:
            case = CASES[name]
            lm = cases.model(case.kind, tie=case.tie)
            engine = ds_stochdpo.initialize(
                model=lm,
                config=ds_stochdpo.StochDPOConfig(**case.settings),
                deepspeed=cases.deepspeed_json(
                    case.stage, getattr(cases, case.optimizer), reduce_bucket_size=case.bucket
                ),
            )
            layouts = []
            engine.module.register_forward_pre_hook(lambda _, args, seen=layouts: seen.append(args[0].pair_ids))
            record = {"metrics": [], "micro_batches": [], "kept": []}
            for step, (pairs, num_first) in enumerate(zip(cases.step_pairs(), case.num_first, strict=True)):
                own = cases.shares(pairs, num_first)[ranks.rank]
                draws = cases.global_draws(engine.config.pruning, pairs, seed=3, step=step)
                own_draws = cases.shares(draws, num_first)[ranks.rank]
                layouts.clear()
                record["metrics"].append(engine.train_step(own, own_draws if case.gives_draws else None))
                record["micro_batches"].append(list(layouts))
                record["kept"].append([d.kept for d in own_draws])
            record["partitions"] = [
                (n, p.ds_status.name, p.data.numel(), p.ds_tensor.numel(), p.ds_numel, p.ds_persist)
                for n, p in lm.named_parameters()
                if hasattr(p, "ds_id")
            ]
            engine.export(folder / name)
            done[name] = record
    return done


def train_plainly(names, folder):
    """Worker: the same runs by the plain loop."""
    from safetensors.torch import save_file

    from ds_stochdpo.config import PruningPlan

    done = {}
    for name in names:
        case = CASES[name]
        lm = cases.model(case.kind, tie=case.tie)
        plan = PruningPlan(**getattr(cases, case.pruning))
        before = {n: p.detach().clone() for n, p in lm.named_parameters()}
        done[name] = cases.plain_training(
            lm,
            cases.step_pairs(),
            lambda pairs, step, plan=plan: cases.global_draws(plan, pairs, seed=3, step=step),
            getattr(cases, case.optimizer),
        )
        save_file(before, folder / f"{name}-before.safetensors")
        save_file({n: p.detach().clone() for n, p in lm.named_parameters()}, folder / f"{name}.safetensors")
    # The comparison is worth something only if neither was there.
    assert "deepspeed" not in sys.modules
    assert "ds_stochdpo.engine" not in sys.modules
    return done


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return harness.run(train_on_ranks, 2, tmp_path_factory.mktemp("ranks"), list(CASES))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    (results,), job = harness.run(train_plainly, 1, tmp_path_factory.mktemp("plain"), list(CASES))
    return results, job.folder


@pytest.mark.parametrize("name", CASES)
def test_weights_equal_plain_training(two_ranks, plain, name, record_property):
    results, job = two_ranks
    records, folder = plain
    got = load_file(job.folder / name / "model.safetensors")
    before, want = load_file(folder / f"{name}-before.safetensors"), load_file(folder / f"{name}.safetensors")
    update = {n: want[n].double() - before[n].double() for n in want}
    got_update = {n: got[n].double() - before[n].double() for n in want}
    errors = {
        "weights": relative_error(got, want),
        "largest": max(float((got[n] - want[n]).abs().max()) for n in want),
        "update": relative_error(got_update, update),
        "moved": relative_error(want, before),
    }
    record_property("errors", errors)
    print(name, errors)
    assert errors["moved"] > 1e-3
    assert errors["weights"] < 1e-6
    # fp32 weights of size 1 round at 6e-8, so the small update itself is known to fewer digits.
    assert errors["update"] < 1e-4
    for rank in range(2):
        metrics = results[rank][name]["metrics"]
        assert [m["loss"] for m in metrics] == pytest.approx([r["loss"] for r in records[name]], rel=1e-5)
        assert [m["grad_norm"] for m in metrics] == pytest.approx([r["grad_norm"] for r in records[name]], rel=1e-5)


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.stage == 3])
def test_every_parameter_is_partitioned(two_ranks, name):
    results, _ = two_ranks
    case = CASES[name]
    expected = {n: p.numel() for n, p in cases.model(case.kind, tie=case.tie).named_parameters()}
    for record in (r[name] for r in results):
        assert {n: whole for n, _, _, _, whole, _ in record["partitions"]} == expected
        for parameter, status, held, own, whole, persists in record["partitions"]:
            assert (status, held, persists) == ("NOT_AVAILABLE", 0, False), parameter
            assert own == -(-whole // 2), parameter


def test_ranks_kept_different_branches_and_ran_different_micro_batches(two_ranks):
    results, _ = two_ranks
    first, second = (r["z3-untied-sgd"] for r in results)
    assert all({*a, *b} == {"chosen", "rejected"} for a, b in zip(first["kept"], second["kept"], strict=True))
    assert any(a != b for a, b in zip(first["kept"], second["kept"], strict=True))
    assert all(len(m) == 2 for m in first["micro_batches"] + second["micro_batches"])
    for name in ("z3-token-budget", "z2-token-budget"):
        first, second = (r[name]["micro_batches"] for r in results)
        real = [[sum(bool(ids) for ids in step) for step in rank] for rank in (first, second)]
        # Both ranks run the same number; the one with less work fills up with dummies.
        assert [len(s) for s in first] == [len(s) for s in second]
        assert all(a > b for a, b in zip(*real, strict=True)), real
    for name in ("z3-empty-rank", "z1-empty-rank"):
        sizes = [[sum(map(len, step)) for step in r[name]["micro_batches"]] for r in results]
        assert 0 in sizes[1]
        assert [a + b for a, b in zip(*sizes, strict=True)] == [8] * cases.NUM_STEPS


def test_models_with_experts_report_the_balance_of_their_routers(two_ranks):
    results, _ = two_ranks
    for name, case in CASES.items():
        for metrics in results[0][name]["metrics"]:
            if "num_experts_per_tok" not in cases.OTHER_FAMILIES.get(case.kind, {}):
                assert "router/aux_loss" not in metrics
            else:
                assert 2.0 <= metrics["router/aux_loss"] < 6.0


def test_metrics_are_equal_on_all_ranks(two_ranks):
    results, _ = two_ranks
    for name in CASES:
        assert results[0][name]["metrics"] == results[1][name]["metrics"]
        assert all(torch.isfinite(torch.tensor(list(m.values()))).all() for m in results[0][name]["metrics"])
