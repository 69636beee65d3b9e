"""12 optimizer steps equal 8 and, after a stop, 4 more: bit for bit, and on another number of ranks to rounding."""

import contextlib
import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from ds_stochdpo.engine.completeness import find_damage
from tests.multiproc import cases, harness
from tests.tiny import tiny_llama, tiny_tokenizer, write_pairs

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(600)]

STAGES = (0, 1, 2, 3)
# 11 pairs in steps of 4: three steps an epoch, the last of three pairs. Step 8 lies within an epoch and within a
# logging window; 4 pairs of a step are 2 ranks x 1 pair x 2 micro-steps.
SETTINGS = {
    "max_steps": 12,
    "save_steps": 8,
    "logging_steps": 3,
    "eval_steps": 5,
    "log_draws": True,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 4,
    "weight_decay": 0.1,
    "seed": 3,
    **cases.PRUNED,
}


def job_files(folder):
    """Model, pairs and DeepSpeed settings of every stage."""
    tokenizer = tiny_tokenizer()
    tiny_llama(len(tokenizer), initializer_range=0.2).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_pairs(folder / "pairs.jsonl", 11)
    # With the usual eps, 1e-8, rounding in tiny gradients would decide the sign of an update.
    adamw = {
        "type": "AdamW",
        "params": {"lr": 1e-3, "eps": 1e-4, "weight_decay": "auto", "torch_adam": True, "fused": True},
    }
    for stage in STAGES:
        settings = {**cases.deepspeed_json(stage, adamw), "gradient_clipping": 0.5}
        (folder / f"zero{stage}.json").write_text(json.dumps(settings))


def train(ranks, folder, name, stage, **settings):
    """One run of the training script's own function, inside a process group that outlives it."""
    from ds_stochdpo import StochDPOConfig
    from ds_stochdpo.train import run

    run.process_group = lambda *_: contextlib.nullcontext(ranks)
    run.write_report = lambda folder: None
    values = {
        "model_name_or_path": str(folder / "model"),
        "dataset_name": str(folder / "pairs.jsonl"),
        "dataset_test_split": str(folder / "pairs.jsonl"),
        "reference_cache_dir": str(folder / f"cache{ranks.world_size}"),
        "output_dir": str(folder / name),
        "deepspeed": str(folder / f"zero{stage}.json"),
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 4 // ranks.world_size,
        **SETTINGS,
        **settings,
    }
    run.run_training(StochDPOConfig(**values))


def stopped_at_8(folder, whole, name):
    """The folder of a run as it was after step 8, but for lines and a report of later steps."""
    shutil.copytree(folder / whole, folder / name)
    shutil.rmtree(folder / name / "checkpoint-12")
    (folder / name / "model.safetensors").unlink()


def train_and_resume(args, folder):
    """Worker: each stage whole, and again from step 8 in a copy; at stage 3 also from what one rank has saved."""
    from ds_stochdpo.engine import process_group

    with process_group() as ranks:
        for stage in STAGES:
            train(ranks, folder, f"whole{stage}", stage)
            if ranks.is_main:
                stopped_at_8(folder, f"whole{stage}", f"resumed{stage}")
                # The reference has to be scored again, by the policy as it was before training.
                shutil.rmtree(folder / "cache2")
            ranks.barrier()
            train(ranks, folder, f"resumed{stage}", stage, resume_from_checkpoint="latest")
        train(ranks, folder, "unsaved3", 3, save_steps=None)
        for stage in args:
            train(ranks, folder, f"one-to-two{stage}", stage, resume_from_checkpoint="true")
        return {
            "separate folders": refusal(lambda: train(ranks, folder, f"root{ranks.rank}/run", 3)),
            "full disk": refusal(lambda: with_full_disk(ranks, folder)),
            "other batch": refusal(
                lambda: train(
                    ranks, folder, "whole3", 3, gradient_accumulation_steps=1, resume_from_checkpoint="latest"
                )
            ),
            "work of one rank": (ranks.on_main(lambda: ranks.rank + 40), refusal(lambda: ranks.on_main(fail))),
        }


def refusal(work):
    """Sentence with which `work` ended, on this rank."""
    from ds_stochdpo import StochDPOError

    try:
        work()
    except StochDPOError as error:
        return f"{type(error).__name__}: {error}"
    return None


def fail():
    from ds_stochdpo import DataError

    raise DataError("rank 0 says no")


def with_full_disk(ranks, folder):
    """A run whose second rank cannot write its part of the second checkpoint."""
    from ds_stochdpo.engine import pickles

    write = pickles.torch.save

    def refuse(state, path, *rest, **options):
        if ".checkpoint-12" in path and ranks.rank == 1:
            raise OSError(28, "No space left on device", path)
        write(state, path, *rest, **options)

    pickles.torch.save = refuse
    try:
        train(ranks, folder, "full", 3)
    finally:
        pickles.torch.save = write


ONE_TO_TWO = (3,)
TWO_TO_ONE = (0, 1, 3)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, single_process):
    folder = tmp_path_factory.mktemp("resume")
    job_files(folder)
    for stage in ONE_TO_TWO:
        train(single_process, folder, f"one{stage}", stage)
        stopped_at_8(folder, f"one{stage}", f"one-to-two{stage}")
    said, _ = harness.run(train_and_resume, 2, folder, ONE_TO_TWO, limit_s=400)
    for stage in TWO_TO_ONE:
        stopped_at_8(folder, f"whole{stage}", f"two-to-one{stage}")
        train(single_process, folder, f"two-to-one{stage}", stage, resume_from_checkpoint="latest")
    (folder / "said.json").write_text(json.dumps(said))
    return folder


def lines(folder, name="metrics.jsonl"):
    parsed = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in parsed]


def states(checkpoint):
    """Everything DeepSpeed saved, by file."""
    # A file that only the test opens, written by the job above.
    return {p.name: torch.load(p, weights_only=False) for p in sorted((checkpoint / "deepspeed").glob("*.pt"))}


def assert_same(one, two, path=""):
    """Equal to the last bit, whatever tensors, dicts and lists it is made of."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, two), path
    elif isinstance(one, dict):
        assert one.keys() == two.keys(), path
        for key in one:
            assert_same(one[key], two[key], f"{path}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(two), path
        for i, (a, b) in enumerate(zip(one, two, strict=True)):
            assert_same(a, b, f"{path}/{i}")
    elif not hasattr(one, "__dict__"):
        assert one == two, path


@pytest.mark.parametrize("stage", STAGES)
def test_twelve_steps_equal_eight_and_four_more(runs, stage):
    whole, resumed = runs / f"whole{stage}", runs / f"resumed{stage}"
    assert [line["step"] for line in lines(whole) if "loss" in line] == [3, 6, 9, 12]
    assert lines(resumed) == lines(whole)
    assert (resumed / "draws.jsonl").read_bytes() == (whole / "draws.jsonl").read_bytes()
    assert_same(load_file(whole / "model.safetensors"), load_file(resumed / "model.safetensors"))
    assert_same(states(whole / "checkpoint-12"), states(resumed / "checkpoint-12"))
    run = json.loads((resumed / "run.json").read_text())
    assert [(start["step"], start["changes"]) for start in run["resumed"]] == [(8, {})]
    assert run["finished"] is True


def test_saving_changes_nothing(runs):
    assert lines(runs / "unsaved3") == lines(runs / "whole3")
    assert not list((runs / "unsaved3").glob("checkpoint-*"))


CONVERSIONS = [
    *(("one", "one-to-two", stage) for stage in ONE_TO_TWO),
    *(("whole", "two-to-one", stage) for stage in TWO_TO_ONE),
]


@pytest.mark.parametrize(("before", "after", "stage"), CONVERSIONS)
def test_another_number_of_ranks_takes_the_same_steps(runs, before, after, stage):
    before, after = runs / f"{before}{stage}", runs / f"{after}{stage}"
    assert (after / "draws.jsonl").read_bytes() == (before / "draws.jsonl").read_bytes()
    weights = load_file(before / "model.safetensors")
    start = load_file(runs / "model" / "model.safetensors")
    for name, value in load_file(after / "model.safetensors").items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-6)
        assert (value - start[name]).abs().max() > 1e-4
    for one, two in zip(lines(before), lines(after), strict=True):
        assert two == pytest.approx(one, rel=2e-5, abs=2e-6)
    assert not list(after.glob(".checkpoint-*"))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("separate folders", r"ConfigError: .*rank 1 \(.*/root1/run\) cannot see a file that rank 0 \(.*/root0/run\)"),
        ("full disk", r"CheckpointError: checkpoint .*checkpoint-12 cannot be written \(rank 1: .*No space left"),
        ("other batch", r"pairs_per_step: saved 4, given 2.*2 rank\(s\) x .*batch_size 1 x .*steps 1"),
    ],
)
def test_what_one_rank_meets_ends_all_of_them_with_one_sentence(runs, what, words):
    first, second = (answers[what] for answers in json.loads((runs / "said.json").read_text()))
    # Each rank names its own output_dir.
    assert first == second or what == "separate folders"
    for sentence in (first, second):
        assert re.search(words, sentence, re.DOTALL), sentence


def test_a_save_that_failed_leaves_the_older_checkpoint_alone(runs):
    assert find_damage(runs / "full" / "checkpoint-8") is None
    assert [p.name for p in (runs / "full").glob("*checkpoint-*")] == ["checkpoint-8"]


def test_the_result_and_the_error_of_rank_0_reach_the_others(runs):
    for answers in json.loads((runs / "said.json").read_text()):
        assert answers["work of one rank"] == [40, "DataError: rank 0 says no"]
