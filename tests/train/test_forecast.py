"""What a forecast says against numbers worked by hand and against the metrics of a real step."""

import pytest

from ds_stochdpo import StochDPOConfig
from ds_stochdpo.pruning import ModelShape
from ds_stochdpo.train.forecast import assumed_pairs, forecast

SHAPE = ModelShape(hidden=32, layers=2, ffn=64, heads=4, kv_heads=2, head_dim=8, vocab=97)


def config_of(**settings):
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    return StochDPOConfig(**{**sizes, **settings})


def test_assumed_pairs_fill_the_length():
    (pair,) = assumed_pairs(config_of(), 64, 1)
    assert [len(ids) for ids in (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids)] == [32, 32, 32]
    assert pair.shared_start == 0
    (pair,) = assumed_pairs(config_of(max_prompt_length=8), 64, 1)
    assert [len(ids) for ids in (pair.prompt_ids, pair.chosen_ids)] == [8, 56]
    (pair,) = assumed_pairs(config_of(max_prompt_length=99), 2, 1)
    assert [len(ids) for ids in (pair.prompt_ids, pair.chosen_ids)] == [1, 1]


def test_nothing_pruned_by_hand():
    """P = T = 32: stock runs 2 x 64; sharing runs 32 + 2 x 31, for the last token is never an input."""
    counts = forecast(assumed_pairs(config_of(), 64, 8), config_of(), SHAPE, world_size=2)
    assert (counts.num_pairs, counts.stock_tokens, counts.stock_scored) == (8, 128, 64)
    assert (counts.executed, counts.backward, counts.scored) == (94, 94, 64)
    assert (counts.micro_batches, counts.live_tokens, counts.frozen_tokens, counts.live_rows) == (1, 376, 0, 256)
    assert counts.flops < counts.stock_flops


def test_one_branch_by_hand():
    """Live: 32 + 31; frozen: 31; a budget of 200 tokens holds two pairs of 94."""
    config = config_of(branch="single", max_tokens_per_micro_batch=200)
    counts = forecast(assumed_pairs(config, 64, 8), config, SHAPE, world_size=2)
    assert (counts.executed, counts.backward, counts.scored) == (94, 63, 64)
    assert (counts.micro_batches, counts.live_tokens, counts.frozen_tokens, counts.live_rows) == (2, 126, 62, 64)


def test_rates_show_in_the_means():
    config = config_of(position_keep=0.5, prefix_keep=0.6)
    counts = forecast(assumed_pairs(config, 512, 128), config, SHAPE, world_size=1)
    # E[K] = 0.6 T within three standard errors of 64 coupled draws; half of those positions are scored.
    assert counts.scored / counts.stock_scored == pytest.approx(0.3, abs=0.06)
    assert (counts.executed - 256) / 512 == pytest.approx(0.6, abs=0.12)
    assert counts.num_pairs == 64


def test_it_counts_what_a_step_counts(single_process):
    import ds_stochdpo
    from tests.oracle import random_pairs
    from tests.tiny import tiny_llama

    config = config_of(reference="none", branch="single", position_keep=0.5, prefix_keep=0.75)
    pairs = random_pairs([(6, 19, 5), (4, 12, 17), (9, 3, 11), (2, 14, 16)], 97, seed=1, shared=0, refs=False)
    engine = ds_stochdpo.initialize(model=tiny_llama(97), config=config)
    metrics = engine.train_step(pairs)
    counts = forecast(pairs, config, engine.shape, world_size=1)
    assert metrics["tokens/executed"] == counts.executed * 4
    assert metrics["tokens/backward"] == counts.backward * 4
    assert metrics["tokens/scored"] == counts.scored * 4
    assert metrics["tokens/full"] == counts.stock_tokens * 4
