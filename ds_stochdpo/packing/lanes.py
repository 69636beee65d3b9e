"""The packed form of a micro-batch: a live lane with gradient and a frozen lane without, and the rows to score.

Shape letters: T packed tokens of one lane, C captured prompt rows, K scored rows, P pairs.
Entry: `pack_lanes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ds_stochdpo.data.pair import PreferencePair
from ds_stochdpo.packing.segments import AttentionSegments
from ds_stochdpo.pruning.draws import BranchDraw, PairDraw

SLOTS = ("chosen", "rejected", "shared")
"""A scored row belongs to one slot of its pair; `shared` counts for both branches."""

_Moved = TypeVar("_Moved")


@dataclass(frozen=True, eq=False)
class Lane:
    """Tokens that run together through every layer.

    Attributes:
        ids_T: Input token ids, int64.
        positions_T: Position of each token in its own sequence, starting at 0 with the prompt, int64.
        segments: Which keys each run of queries sees.
    """

    ids_T: Tensor
    positions_T: Tensor
    segments: AttentionSegments


@dataclass(frozen=True, eq=False)
class ScoreRows:
    """Hidden states that meet the head, and what is done with their log-probs.

    Attributes:
        row_K: Row of the lane whose hidden state predicts the target, int64.
        target_K: Token to score, int64.
        weight_K: Inverse probability of the row in the estimate, float64 (METHOD.md M5, M12).
        ref_K: Reference log-prob of the same token in nats, float64; 0 without a reference.
        slot_K: 3 * pair index + index into `SLOTS`, int64.
        position_K: Position of the token in its response, 0-based, int64.
    """

    row_K: Tensor
    target_K: Tensor
    weight_K: Tensor
    ref_K: Tensor
    slot_K: Tensor
    position_K: Tensor


@dataclass(frozen=True)
class TokenCounts:
    """Work of a micro-batch in tokens: run through the layers, met the head, took part in the backward pass."""

    executed: int = 0
    scored: int = 0
    backward: int = 0


@dataclass(frozen=True, eq=False)
class LaneLayout:
    """One micro-batch, ready to run.

    Attributes:
        live: Prompts and kept response prefixes; carries gradient.
        frozen: Dropped response prefixes; runs without gradient.
        prompt_rows_C: Live rows whose keys and values the frozen lane reads.
        live_rows: Scored rows of the live lane that carry gradient.
        detached_rows: Scored rows of the live lane without gradient: shared starts, first tokens of dropped branches.
        frozen_rows: Scored rows of the frozen lane.
        pair_ids: Pairs in this micro-batch, in slot order; empty for a dummy.
        counts: Tokens run, scored and back-propagated.
    """

    live: Lane
    frozen: Lane
    prompt_rows_C: Tensor
    live_rows: ScoreRows
    detached_rows: ScoreRows
    frozen_rows: ScoreRows
    pair_ids: tuple[int, ...]
    counts: TokenCounts

    @property
    def num_pairs(self) -> int:
        """Pairs in this micro-batch; 0 for a dummy."""
        return len(self.pair_ids)

    def to(self, device: torch.device | str) -> LaneLayout:
        """Same layout with every tensor on `device`."""
        return _move(self, torch.device(device))


def _move(item: _Moved, device: torch.device) -> _Moved:
    if isinstance(item, Tensor):
        return item.to(device, non_blocking=True)  # type: ignore[return-value]
    if is_dataclass(item) and not isinstance(item, type):
        moved: dict[str, Any] = {f.name: _move(getattr(item, f.name), device) for f in fields(item) if f.init}
        return replace(item, **moved)
    return item


@dataclass
class _LaneBuilder:
    """Grows one lane, segment by segment; keys are row numbers of [captured prompts, own rows]."""

    ids: list[np.ndarray] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)
    q_lens: list[int] = field(default_factory=list)
    keys: list[np.ndarray] = field(default_factory=list)
    num_tokens: int = 0
    gathers: bool = False

    def append(self, ids: np.ndarray, first_position: int, context: np.ndarray | None) -> np.ndarray:
        """Add one run of tokens; `context` holds the key rows it sees before itself. Returns its rows."""
        rows = np.arange(self.num_tokens, self.num_tokens + len(ids))
        if len(ids) == 0:
            return rows
        self.ids.append(ids)
        self.positions.append(np.arange(first_position, first_position + len(ids)))
        self.q_lens.append(len(ids))
        # A context of None means keys = queries; otherwise the lane needs gathered keys.
        self.keys.append(rows if context is None else np.concatenate([context, rows]))
        self.gathers |= context is not None
        self.num_tokens += len(ids)
        return rows

    def build(self) -> Lane:
        k_lens = tuple(len(k) for k in self.keys)
        k_index = _concat(self.keys) if self.gathers else None
        return Lane(
            ids_T=_concat(self.ids),
            positions_T=_concat(self.positions),
            segments=AttentionSegments(tuple(self.q_lens), k_lens, k_index),
        )


class _RowBuilder:
    """Grows the list of scored rows, some positions of one response at a time."""

    def __init__(self) -> None:
        self.columns: dict[str, list[np.ndarray]] = {f.name: [] for f in fields(ScoreRows)}

    def append(self, rows: np.ndarray, branch: _Branch, positions: np.ndarray, weights: np.ndarray, slot: int) -> None:
        parts = {
            "row_K": rows,
            "target_K": branch.response[positions],
            "weight_K": weights,
            "ref_K": np.zeros(len(rows)) if branch.ref_logps is None else branch.ref_logps[positions],
            "slot_K": np.full(len(rows), slot),
            "position_K": positions,
        }
        for name, part in parts.items():
            self.columns[name].append(part)

    def build(self) -> ScoreRows:
        return ScoreRows(
            **{name: _concat(parts, np.float64 if name in _REAL else np.int64) for name, parts in self.columns.items()}
        )


_REAL = ("weight_K", "ref_K")


@dataclass(frozen=True, eq=False)
class _Branch:
    """One response of a pair as the packer sees it."""

    response: np.ndarray
    ref_logps: np.ndarray | None
    draw: BranchDraw
    slot: int
    shared: int

    @property
    def scored(self) -> tuple[np.ndarray, np.ndarray]:
        """Sampled positions after the shared start, and their weights."""
        own = self.draw.positions >= self.shared
        return self.draw.positions[own], self.draw.weights[own]

    @property
    def inputs(self) -> np.ndarray:
        """Own tokens to run: up to the last sampled position; that token itself is never an input."""
        positions, _ = self.scored
        last = int(positions[-1]) if len(positions) else self.shared
        return self.response[self.shared : last]


class _Packer:
    """Places pairs into the two lanes."""

    def __init__(self, share_prompt: bool, share_response_start: bool) -> None:
        self.share_prompt = share_prompt
        self.share_response_start = share_response_start
        self.live, self.frozen = _LaneBuilder(), _LaneBuilder()
        self.live_rows, self.detached_rows, self.frozen_rows = _RowBuilder(), _RowBuilder(), _RowBuilder()
        self.captured: list[np.ndarray] = []
        self.num_captured = 0

    def add(self, index: int, pair: PreferencePair, draw: PairDraw) -> None:
        shared = pair.shared_start if self.share_response_start else 0
        chosen = _Branch(pair.chosen_ids, pair.chosen_ref_logps, draw.chosen, 3 * index, shared)
        rejected = _Branch(pair.rejected_ids, pair.rejected_ref_logps, draw.rejected, 3 * index + 1, shared)
        kept = {"both": [chosen, rejected], "chosen": [chosen], "rejected": [rejected]}[draw.kept]
        dropped = [b for b in (chosen, rejected) if b not in kept]
        common = np.concatenate([pair.prompt_ids, pair.chosen_ids[:shared]])
        context = self._add_live(common, kept)
        self._score_shared_start(context, len(pair.prompt_ids), chosen, 3 * index + 2)
        for branch in dropped:
            if self.share_prompt:
                self._add_frozen_after_prompt(context, branch)
            else:
                self._add_frozen_alone(common, branch)

    def _add_live(self, common: np.ndarray, kept: list[_Branch]) -> np.ndarray:
        """Run the kept branches; returns the rows of the first copy of the common part."""
        first: np.ndarray | None = None
        for branch in kept:
            if first is None or not self.share_prompt:
                rows = self.live.append(np.concatenate([common, branch.inputs]), 0, None)
                context, own = rows[: len(common)], rows[len(common) :]
            else:
                context, own = first, self.live.append(branch.inputs, len(common), first)
            first = context if first is None else first
            _score(self.live_rows, branch, int(context[-1]), self.live_rows, own)
        assert first is not None
        return first

    def _score_shared_start(self, context: np.ndarray, prompt_tokens: int, branch: _Branch, slot: int) -> None:
        positions = np.arange(branch.shared)
        self.detached_rows.append(
            context[prompt_tokens - 1 + positions], branch, positions, np.ones(branch.shared), slot
        )

    def _add_frozen_after_prompt(self, context: np.ndarray, branch: _Branch) -> None:
        inputs = branch.inputs
        own = np.zeros(0, np.int64)
        if len(inputs):
            captured = np.arange(self.num_captured, self.num_captured + len(context))
            own = self.frozen.append(inputs, len(context), captured)
            self.captured.append(context)
            self.num_captured += len(context)
        _score(self.detached_rows, branch, int(context[-1]), self.frozen_rows, own)

    def _add_frozen_alone(self, common: np.ndarray, branch: _Branch) -> None:
        rows = self.frozen.append(np.concatenate([common, branch.inputs]), 0, None)
        _score(self.frozen_rows, branch, int(rows[len(common) - 1]), self.frozen_rows, rows[len(common) :])


def _score(first: _RowBuilder, branch: _Branch, context_row: int, later: _RowBuilder, own: np.ndarray) -> None:
    """List the sampled positions: the first own token is predicted by the context, the others by own rows."""
    positions, weights = branch.scored
    head = int(len(positions) > 0 and positions[0] == branch.shared)
    first.append(np.full(head, context_row), branch, positions[:head], weights[:head], branch.slot)
    tail = positions[head:]
    later.append(own[tail - branch.shared - 1], branch, tail, weights[head:], branch.slot)


def pack_lanes(
    pairs: Sequence[PreferencePair],
    draws: Sequence[PairDraw],
    *,
    share_prompt: bool = True,
    share_response_start: bool = True,
) -> LaneLayout:
    """Lay the drawn parts of some pairs into two lanes.

    Each lane runs only up to its last sampled position, which is exact by causality. With `share_prompt` a prompt runs
    once in the live lane: a second kept response and the dropped one read its keys and values. Without it every
    response runs behind a prompt of its own. No pairs give a dummy: one token, no scored row.

    Args:
        pairs: Pairs of the micro-batch.
        draws: One draw for each pair, in the same order.
        share_prompt: Run the prompt once for both branches.
        share_response_start: Treat the tokens both responses begin with as prompt and score them once, without
            gradient and with weight 1 (METHOD.md M21).

    Returns:
        The layout, on the CPU.

    Raises:
        ValueError: If `pairs` and `draws` differ in length.

    Source: our design; prefix sharing as in arXiv:2410.20305.
    """
    if len(pairs) != len(draws):
        raise ValueError(f"{len(pairs)} pairs but {len(draws)} draws; give one draw for each pair.")
    packer = _Packer(share_prompt, share_response_start)
    for index, (pair, draw) in enumerate(zip(pairs, draws, strict=True)):
        packer.add(index, pair, draw)
    if not pairs:
        packer.live.append(np.zeros(1, np.int64), 0, None)
    live, frozen = packer.live, packer.frozen
    for i, keys in enumerate(frozen.keys):
        # Captured prompt rows come first in the key source, so a segment's own rows lie behind all of them.
        own = frozen.q_lens[i]
        frozen.keys[i] = np.concatenate([keys[:-own], keys[-own:] + packer.num_captured])
    rows = (packer.live_rows.build(), packer.detached_rows.build(), packer.frozen_rows.build())
    counts = TokenCounts(
        executed=live.num_tokens + frozen.num_tokens,
        scored=sum(len(r.row_K) for r in rows),
        backward=live.num_tokens,
    )
    return LaneLayout(
        live=live.build(),
        frozen=frozen.build(),
        prompt_rows_C=_concat(packer.captured),
        live_rows=rows[0],
        detached_rows=rows[1],
        frozen_rows=rows[2],
        pair_ids=tuple(p.pair_id for p in pairs),
        counts=counts if pairs else TokenCounts(),
    )


def _concat(parts: list[np.ndarray], dtype: type = np.int64) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype))
