"""What ranks settle before a step: draws over all pairs, equally many micro-batches. Entry: `plan_micro_batches`."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.data.pair import PreferencePair
from ds_stochdpo.engine.distributed import Ranks
from ds_stochdpo.errors import ConfigError, LockstepError
from ds_stochdpo.packing import BatchLimits, check_draws, cut_micro_batches, draw_lengths, lane_tokens
from ds_stochdpo.pruning import PairDraw


def draw_over_ranks(
    ranks: Ranks, pairs: Sequence[PreferencePair], config: StochDPOConfig, *, epoch: int, step: int
) -> list[PairDraw]:
    """This rank's part of the draws over the pairs of all ranks. Collective."""
    own = [(p.pair_id, len(p.chosen_ids), len(p.rejected_ids)) for p in pairs]
    # Every rank: a balanced branch draw needs the pairs of all ranks.
    shares = ranks.gather_objects(own)
    lengths = [row for share in shares for row in share]
    draws = draw_lengths(lengths, config, epoch=epoch, step=step)
    start = sum(len(share) for share in shares[: ranks.rank])
    return draws[start : start + len(own)]


def plan_micro_batches(
    ranks: Ranks,
    pairs: Sequence[PreferencePair],
    draws: Sequence[PairDraw],
    limits: BatchLimits,
    config: StochDPOConfig,
    *,
    step: int,
    epoch: int,
) -> tuple[list[list[int]], int]:
    """Cut this rank's pairs into micro-batches. Collective.

    Args:
        ranks: This process among the others.
        pairs: This rank's pairs.
        draws: One draw for each of them.
        limits: Pairs and tokens of a micro-batch.
        config: Settings; they must be the same on every rank.
        step: Optimizer steps taken, likewise.
        epoch: Epoch of the draws, likewise.

    Returns:
        Indices of each micro-batch, padded with empty ones to the same number on every rank; pairs of all ranks.

    Raises:
        ConfigError: If there are no pairs on any rank.
        LockstepError: If the ranks are at different steps or have different settings.
    """
    check_draws(pairs, draws)
    shares = {"share_prompt": config.share_prompt, "share_response_start": config.share_response_start}
    tokens = [lane_tokens(p, d, **shares).total for p, d in zip(pairs, draws, strict=True)]
    micro_batches = cut_micro_batches(tokens, limits)
    settings = zlib.crc32(repr(sorted(config.to_dict().items())).encode())
    # Every rank: the count must agree, for each forward and backward is a collective.
    rows = ranks.rows([len(pairs), len(micro_batches), step, epoch, settings])
    if len({tuple(row[2:]) for row in rows}) > 1:
        raise LockstepError(
            f"ranks disagree on (optimizer step, epoch, settings): {[row[2:] for row in rows]}; "
            "start every rank with the same command and data."
        )
    if not sum(row[0] for row in rows):
        raise ConfigError("there are no pairs on any rank; pass at least one.")
    micro_batches += [[] for _ in range(max(row[1] for row in rows) - len(micro_batches))]
    return micro_batches, sum(row[0] for row in rows)


def train_limits(config: StochDPOConfig) -> BatchLimits:
    """Pairs and tokens of a training micro-batch; for settings with nothing left open."""
    assert config.per_device_train_batch_size is not None
    return BatchLimits(config.per_device_train_batch_size, config.max_tokens_per_micro_batch)


def check_reference(pairs: Sequence[PreferencePair], config: StochDPOConfig) -> None:
    """Refuse pairs without the reference log-probs that the settings ask for.

    Raises:
        ConfigError: Naming the first such pair.
    """
    if config.reference != "cached":
        return
    for pair in pairs:
        if pair.chosen_ref_logps is None or pair.rejected_ref_logps is None:
            raise ConfigError(
                f"pair {pair.pair_id} ({pair.source}) has no reference log-probs, but reference is "
                f"{config.reference}; pass pairs from add_reference, or set reference: none."
            )
