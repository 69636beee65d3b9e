"""What ranks read for themselves: sets that take them unlike times to tokenise, and one stream for all."""

import os
import time
from datetime import timedelta

import pytest
import torch

from tests.multiproc import harness
from tests.tiny import pair_rows, tiny_llama, tiny_tokenizer, write_rows

LIMIT_S = 5
SLOW_ROW_S = 0.5
NUM_ROWS = 16
NUM_STEPS = 4
ZERO3 = {
    "optimizer": {"type": "SGD", "params": {"lr": 0.03}},
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def rows():
    made = pair_rows(NUM_ROWS)
    made[2] = {**made[2], "chosen": None}
    return made


def train_on_a_stream(path, record_folder, world_size):
    """Metrics and the stream's counts after some steps of 4 pairs over all ranks, drawn at random, on a stream."""
    import ds_stochdpo
    from ds_stochdpo.data import StreamWindows, open_stream
    from ds_stochdpo.train.loop import TrainLoop, plan_schedule
    from ds_stochdpo.train.record import RunRecord

    tokenizer = tiny_tokenizer()
    config = ds_stochdpo.StochDPOConfig(
        dataset_name=str(path), streaming=True, max_steps=NUM_STEPS, reference="none", branch="single",
        position_keep=0.5, prefix_keep=0.6, per_device_train_batch_size=4 // world_size,
    )  # fmt: skip
    lm = tiny_llama(len(tokenizer), initializer_range=0.2)
    engine = ds_stochdpo.initialize(model=lm, config=config, deepspeed=ZERO3)
    stream = open_stream(config, tokenizer)
    schedule = plan_schedule(engine.config, num_pairs=None, world_size=world_size)
    windows = StreamWindows(stream, pairs_per_step=schedule.pairs_per_step)
    loop = TrainLoop(engine, schedule, RunRecord(record_folder, writes=False), windows)
    shares = []
    step = engine.train_step
    engine.train_step = lambda pairs, draws: (shares.append([p.pair_id for p in pairs]), step(pairs, draws))[1]
    metrics = [{k: v for k, v in loop.train_step().items() if "/step_s" not in k and "memory" not in k}
               for _ in range(NUM_STEPS)]  # fmt: skip
    return {"metrics": metrics, "shares": shares, "counts": stream.counts, "fingerprint": stream.fingerprint}


def collective_limit():
    backend = torch.distributed.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    return getattr(backend, "wrapped_pg", backend).options._timeout


def tokenise_then_stream(_, folder):
    """Worker: rank 1 has a cache of its own, as on another machine; filling it takes longer than a collective may."""
    from ds_stochdpo import StochDPOConfig, load_pairs
    from ds_stochdpo.data.outcome import RowTokeniser
    from ds_stochdpo.engine import process_group

    rank = int(os.environ["RANK"])
    os.environ["HF_DATASETS_CACHE"] = str(folder / f"cache{rank}")
    call = RowTokeniser.__call__
    if rank == 1:
        RowTokeniser.__call__ = lambda self, row, source: (time.sleep(SLOW_ROW_S), call(self, row, source))[1]
    begun = time.monotonic()
    pairs = load_pairs(StochDPOConfig(dataset_name=str(folder / "rows.jsonl")), tiny_tokenizer())
    done = {"seconds": time.monotonic() - begun}
    RowTokeniser.__call__ = call
    with process_group(timedelta(seconds=LIMIT_S)) as ranks:
        done["limit"] = collective_limit()
        done["fingerprints"] = ranks.gather_objects(pairs.fingerprint)
        return done | train_on_a_stream(folder / "rows.jsonl", folder / "record", ranks.world_size)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reading")
    write_rows(folder / "rows.jsonl", rows())
    return harness.run(tokenise_then_stream, 2, folder)[0], folder


@pytest.mark.multiproc
def test_tokenising_may_take_longer_than_a_collective(two_ranks):
    (first, second), _ = two_ranks
    assert second["seconds"] > LIMIT_S
    assert first["fingerprints"] == second["fingerprints"] == first["fingerprints"][:1] * 2


@pytest.mark.multiproc
@pytest.mark.usefixtures("single_process")
def test_collectives_keep_their_limit(two_ranks):
    from ds_stochdpo.engine.distributed import COLLECTIVE_TIMEOUT

    assert collective_limit() == COLLECTIVE_TIMEOUT
    # There torch checks every call, through a wrapper with a limit of its own.
    for rank in two_ranks[0]:
        assert rank["limit"] == timedelta(seconds=LIMIT_S)


@pytest.mark.multiproc
@pytest.mark.usefixtures("single_process")
def test_two_ranks_share_one_stream_and_train_as_one(two_ranks, tmp_path):
    (first, second), folder = two_ranks
    alone = train_on_a_stream(folder / "rows.jsonl", tmp_path, 1)
    for rank in (first, second):
        assert (rank["counts"], rank["fingerprint"]) == (alone["counts"], alone["fingerprint"])
        for want, got in zip(alone["metrics"], rank["metrics"], strict=True):
            assert got == pytest.approx(want, rel=1e-4, abs=1e-6)
    assert alone["counts"] == {"read": 16, "used": 15, "dropped/not text": 1}
    for step, window in enumerate(alone["shares"]):
        # Two pairs for each rank, but for the last window of the pass, which holds three.
        assert sorted(first["shares"][step] + second["shares"][step]) == window
        assert abs(len(first["shares"][step]) - len(second["shares"][step])) == len(window) % 2
    assert [len(window) for window in alone["shares"]] == [4, 4, 4, 3]
