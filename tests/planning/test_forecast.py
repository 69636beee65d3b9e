"""What a forecast says against numbers worked by hand and against the metrics of a real step."""

import pytest

from ds_stochdpo import StochDPOConfig
from ds_stochdpo.planning.forecast import assumed_lengths, assumed_pairs, forecast, stock_of
from ds_stochdpo.pruning import ModelShape

SHAPE = ModelShape(hidden=32, layers=2, ffn=64, heads=4, kv_heads=2, head_dim=8, vocab=97)


def config_of(**settings):
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    return StochDPOConfig(**{**sizes, **settings})


def filling(config, max_length, count):
    prompt, response = assumed_lengths(config, max_length)
    return assumed_pairs(prompt, response, response, count)


@pytest.mark.parametrize(
    ("longest_prompt", "max_length", "lengths"), [(None, 64, (32, 32)), (8, 64, (8, 56)), (99, 2, (1, 1))]
)
def test_assumed_pairs_fill_the_length(longest_prompt, max_length, lengths):
    (pair,) = filling(config_of(max_prompt_length=longest_prompt), max_length, 1)
    assert (len(pair.prompt_ids), len(pair.chosen_ids)) == lengths
    assert len(pair.rejected_ids) == lengths[1]
    assert pair.shared_start == 0


def tokens_of(work):
    return work.tokens_executed, work.tokens_backward, work.tokens_scored


def test_nothing_pruned_by_hand():
    """P = T = 32: stock runs 2 x 64; sharing runs 32 + 2 x 31, for the last token is never an input."""
    pairs, config = filling(config_of(), 64, 8), config_of()
    counts = forecast(pairs, config, SHAPE, world_size=2)
    stock = forecast(pairs, config, SHAPE, world_size=2, variant=stock_of(config))
    assert tokens_of(counts.work) == (94, 94, 64)
    assert tokens_of(stock.work) == (128, 128, 128)
    assert (counts.num_pairs, counts.micro_batches, counts.imbalance) == (8, 1, 1)
    assert tokens_of(counts.largest.work) == (376, 376, 256)
    assert len(counts.largest.pairs) == len(counts.largest.draws) == 4
    assert counts.work.total < stock.work.total


def test_one_branch_by_hand():
    """Live: 32 + 31; frozen: 31; a budget of 200 tokens holds two pairs of 94."""
    config = config_of(branch="single", max_tokens_per_micro_batch=200)
    counts = forecast(filling(config, 64, 8), config, SHAPE, world_size=2)
    assert tokens_of(counts.work) == (94, 63, 64)
    assert counts.micro_batches == 2
    assert tokens_of(counts.largest.work) == (188, 126, 128)


def test_stock_pads_to_the_longest_of_each_micro_batch():
    """Lengths 12 and 20 on one rank, 4 and 6 on the other, in the order of the epoch; two pairs a micro-batch."""
    from tests.oracle import random_pairs

    config = config_of(per_device_train_batch_size=2)
    pairs = random_pairs([(2, 10, 3), (3, 1, 2), (1, 3, 3), (5, 15, 9)], 97)
    counts = forecast(pairs, config, SHAPE, world_size=1, variant=stock_of(config))
    longest = {12: None, 5: None, 4: None, 20: None}
    assert counts.largest.work.tokens_executed == 4 * 20
    assert counts.micro_batches == 1
    assert counts.num_pairs == 4
    assert counts.work.tokens_executed * 4 in [4 * (20 + other) for other in longest]


def test_the_busiest_rank_decides():
    """One long pair among short ones: a rank has it, and the others wait."""
    from tests.oracle import random_pairs

    config = config_of(per_device_train_batch_size=1)
    counts = forecast(random_pairs([(4, 200, 200), (4, 4, 4)], 97), config, SHAPE, world_size=2)
    assert 1.9 < counts.imbalance < 2


def test_rates_show_in_the_means():
    config = config_of(position_keep=0.5, prefix_keep=0.6)
    counts = forecast(filling(config, 512, 128), config, SHAPE, world_size=1)
    # E[K] = 0.6 T within three standard errors of 64 coupled draws; half of those positions are scored.
    assert counts.work.tokens_scored / 512 == pytest.approx(0.3, abs=0.06)
    assert (counts.work.tokens_executed - 256) / 512 == pytest.approx(0.6, abs=0.12)
    assert counts.num_pairs == 64


def test_it_counts_what_a_step_counts(single_process):
    import ds_stochdpo
    from tests.oracle import random_pairs
    from tests.tiny import tiny_llama

    config = config_of(reference="none", branch="single", position_keep=0.5, prefix_keep=0.75)
    pairs = random_pairs([(6, 19, 5), (4, 12, 17), (9, 3, 11), (2, 14, 16)], 97, seed=1, shared=2, refs=False)
    engine = ds_stochdpo.initialize(model=tiny_llama(97), config=config)
    metrics = engine.train_step(pairs)
    work = forecast(pairs, config, engine.shape, world_size=1).work.scaled(4)
    assert metrics["tokens/executed"] == work.tokens_executed
    assert metrics["tokens/backward"] == work.tokens_backward
    assert metrics["tokens/scored"] == work.tokens_scored
