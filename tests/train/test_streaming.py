"""Training on a stream is training on the set in file order."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ds_stochdpo
from ds_stochdpo.data import SetWindows, StreamWindows, load_pairs, open_stream, order
from ds_stochdpo.errors import LockstepError
from ds_stochdpo.train.loop import TrainLoop, plan_schedule
from ds_stochdpo.train.record import RunRecord
from tests.tiny import pair_rows, tiny_llama, tiny_tokenizer, write_rows

PAIRS_PER_STEP = 4
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "gradient_clipping": 0.0}


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize(
    "settings",
    [{"reference": "none"}, {"reference": "online", "branch": "single", "position_keep": 0.5, "prefix_keep": 0.6}],
    ids=lambda settings: settings["reference"],
)
def test_weights_are_those_of_the_set_in_file_order(tmp_path, monkeypatch, settings):
    rows = pair_rows(11)
    rows[4] = {**rows[4], "chosen": None}
    path = write_rows(tmp_path / "rows.jsonl", rows)
    tokenizer = tiny_tokenizer()
    lm, ref_lm = (tiny_llama(len(tokenizer), seed=seed, initializer_range=0.2) for seed in (0, 1))
    monkeypatch.setattr(order, "epoch_order", lambda num_pairs, seed, epoch: np.arange(num_pairs))
    lines = {}
    for streaming in (False, True):
        config = ds_stochdpo.StochDPOConfig(
            dataset_name=str(path), streaming=streaming, max_steps=5, per_device_train_batch_size=2,
            gradient_accumulation_steps=2, **settings,
        )  # fmt: skip
        engine = ds_stochdpo.initialize(
            model=copy.deepcopy(lm),
            ref_model=copy.deepcopy(ref_lm) if settings["reference"] == "online" else None,
            config=config,
            deepspeed=SGD,
        )
        if streaming:
            stream = open_stream(config, tokenizer)
            windows, num_pairs = StreamWindows(stream, pairs_per_step=PAIRS_PER_STEP), None
        else:
            pairs = load_pairs(config, tokenizer).pairs
            windows, num_pairs = SetWindows(pairs, seed=0, pairs_per_step=PAIRS_PER_STEP), len(pairs)
        schedule = plan_schedule(engine.config, num_pairs=num_pairs, world_size=1)
        assert (schedule.pairs_per_step, schedule.total_steps) == (PAIRS_PER_STEP, 5)
        loop = TrainLoop(engine, schedule, RunRecord(tmp_path / str(streaming), writes=True), windows, checkpoints=None)
        loop.run()
        engine.export(tmp_path / str(streaming))
        lines[streaming] = (tmp_path / str(streaming) / "metrics.jsonl").read_text().splitlines()
    before = {name: value.detach() for name, value in lm.named_parameters()}
    want, got = (load_file(tmp_path / str(streaming) / "model.safetensors") for streaming in (False, True))
    for name, value in want.items():
        assert torch.equal(got[name], value), name
    assert not torch.equal(want["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    assert len(lines[True]) == len(lines[False]) == 5
    # The whole of the first pass, though the fourth and fifth step took from the second.
    assert stream.counts == {"read": 11, "used": 10, "dropped/not text": 1}


def test_ranks_that_read_different_pairs_are_stopped():
    pair = ds_stochdpo.PreferencePair(0, *(np.arange(1, n) for n in (3, 4, 5)))
    engine = SimpleNamespace(step=6, config=None, ranks=SimpleNamespace(rows=lambda own: [own, own]))
    loop = TrainLoop(engine, None, None, None, checkpoints=None)
    loop._check_alike([pair])
    engine.ranks.rows = lambda own: [own, [own[0] + 1]]
    with pytest.raises(LockstepError, match="optimizer step 7: the ranks read different pairs from the stream"):
        loop._check_alike([pair])
