"""What `pack_lanes` promises on random pairs and draws: a scored row predicts its token from its own past."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_stochdpo.packing import SLOTS, lane_tokens, pack_lanes
from ds_stochdpo.pruning.draws import BranchDraw, PairDraw, full_draw
from tests.packing.strategies import drawn_pairs, pair_of

options = st.fixed_dictionaries({"share_prompt": st.booleans(), "share_response_start": st.booleans()})
LANES = ("live", "frozen")


def key_source(layout, lane):
    """Ids and positions of the rows that `k_index` counts: captured prompt rows, then the lane's own."""
    own = getattr(layout, lane)
    if lane == "live":
        return own.ids_T, own.positions_T
    captured = layout.prompt_rows_C
    return (
        torch.cat([layout.live.ids_T[captured], own.ids_T]),
        torch.cat([layout.live.positions_T[captured], own.positions_T]),
    )


def contexts(layout, lane):
    """For each row of a lane the (ids, positions) of the keys its query sees, itself last."""
    segments = getattr(layout, lane).segments
    ids, positions = key_source(layout, lane)
    if segments.k_index is not None:
        ids, positions = ids[segments.k_index], positions[segments.k_index]
    assert len(ids) == sum(segments.k_lens)
    seen, k_end = [], 0
    for q_len, k_len in zip(segments.q_lens, segments.k_lens, strict=True):
        k_start, k_end = k_end, k_end + k_len
        for i in range(q_len):
            visible = slice(k_start, k_end - q_len + i + 1)
            seen.append((ids[visible].tolist(), positions[visible].tolist()))
    return seen


def scored(layout):
    """(lane, index in its rows, rows) of each scored row."""
    for lane, rows in (
        ("live", layout.live_rows),
        ("live", layout.detached_rows),
        ("frozen", layout.frozen_rows),
    ):
        for k in range(len(rows.row_K)):
            yield lane, k, rows


def branch_of(pair, slot):
    """Response of a slot; the shared start is part of either."""
    return pair.rejected_ids if SLOTS[slot % 3] == "rejected" else pair.chosen_ids


def expected_rows(pair, draw, index, starts_shared):
    """(slot, position, weight) of every row a pair must have."""
    start = pair.shared_start if starts_shared else 0
    rows = [(3 * index + 2, t, 1.0) for t in range(start)]
    for offset, branch in enumerate((draw.chosen, draw.rejected)):
        rows += [
            (3 * index + offset, int(t), float(w))
            for t, w in zip(branch.positions, branch.weights, strict=True)
            if t >= start
        ]
    return rows


@given(drawn_pairs(), options)
def test_each_scored_row_sees_exactly_its_own_past(batch, options):
    pairs, draws = batch
    layout = pack_lanes(pairs, draws, **options)
    seen = {lane: contexts(layout, lane) for lane in LANES}
    for lane, k, rows in scored(layout):
        slot, position = int(rows.slot_K[k]), int(rows.position_K[k])
        pair = pairs[slot // 3]
        response = branch_of(pair, slot)
        assert rows.target_K[k] == response[position]
        ids, positions = seen[lane][int(rows.row_K[k])]
        assert ids == [*pair.prompt_ids.tolist(), *response[:position].tolist()]
        assert positions == list(range(len(ids)))


@given(drawn_pairs(), options)
def test_rows_are_the_drawn_positions_each_once_with_their_weight_and_reference(batch, options):
    pairs, draws = batch
    layout = pack_lanes(pairs, draws, **options)
    want = [
        row
        for i, (pair, draw) in enumerate(zip(pairs, draws, strict=True))
        for row in expected_rows(pair, draw, i, options["share_response_start"])
    ]
    got = [(int(r.slot_K[k]), int(r.position_K[k]), float(r.weight_K[k])) for _, k, r in scored(layout)]
    assert sorted(got) == sorted(want)
    for _, k, rows in scored(layout):
        pair = pairs[int(rows.slot_K[k]) // 3]
        token = int(rows.target_K[k])
        want_ref = 0.0 if pair.chosen_ref_logps is None else float(np.float32(-token / 1000))
        assert rows.ref_K[k] == want_ref
        assert rows.ref_K.dtype == rows.weight_K.dtype == torch.float64


@given(drawn_pairs(), options)
def test_gradient_flows_to_the_kept_branches_only(batch, options):
    pairs, draws = batch
    layout = pack_lanes(pairs, draws, **options)
    for lane, k, rows in scored(layout):
        pair_index, kind = divmod(int(rows.slot_K[k]), 3)
        is_kept = kind < 2 and draws[pair_index].kept in ("both", SLOTS[kind])
        assert (rows is layout.live_rows) == is_kept
        if is_kept:
            assert lane == "live"
    # A dropped response runs in the frozen lane: none of its own tokens is an input of the live one.
    dropped = [
        own.tolist()
        for pair, draw in zip(pairs, draws, strict=True)
        for name, own in (("chosen", pair.chosen_ids[pair.shared_start :]),
                          ("rejected", pair.rejected_ids[pair.shared_start :]))
        if draw.kept not in ("both", name)
    ]  # fmt: skip
    assert not set(layout.live.ids_T.tolist()) & {token for own in dropped for token in own}


@given(drawn_pairs(), options)
def test_lanes_hold_no_token_behind_the_last_sampled_position(batch, options):
    pairs, draws = batch
    layout = pack_lanes(pairs, draws, **options)
    run = [*layout.live.ids_T.tolist(), *layout.frozen.ids_T.tolist()]
    for pair, draw in zip(pairs, draws, strict=True):
        start = pair.shared_start if options["share_response_start"] else 0
        for response, branch in ((pair.chosen_ids, draw.chosen), (pair.rejected_ids, draw.rejected)):
            own = branch.positions[branch.positions >= pair.shared_start]
            last = int(own[-1]) if len(own) else 0
            behind = response[max(last, pair.shared_start) :]
            assert not set(run) & set(behind.tolist())
            # The last sampled token is predicted, not read; the one before it is the last input.
            if len(own) and last > start and last > pair.shared_start:
                assert response[last - 1] in run


@given(drawn_pairs(), options)
def test_positions_count_up_from_the_prompt_in_every_segment(batch, options):
    pairs, draws = batch
    layout = pack_lanes(pairs, draws, **options)
    prompts = {int(p.prompt_ids[0]) for p in pairs}
    for lane in (layout.live, layout.frozen):
        assert lane.ids_T.dtype == lane.positions_T.dtype == torch.int64
        assert len(lane.ids_T) == len(lane.positions_T) == sum(lane.segments.q_lens)
        for token, position in zip(lane.ids_T.tolist(), lane.positions_T.tolist(), strict=True):
            assert (position == 0) == (token in prompts)
    for lane in LANES:
        for ids, positions in contexts(layout, lane):
            assert len(set(token // 1000 for token in ids)) == 1, "a query sees another pair"
            assert positions == list(range(len(ids)))


@given(drawn_pairs(), options)
def test_counts_are_those_of_the_lanes(batch, options):
    pairs, draws = batch
    layout = pack_lanes(pairs, draws, **options)
    tokens = [lane_tokens(p, d, **options) for p, d in zip(pairs, draws, strict=True)]
    assert len(layout.live.ids_T) == sum(t.live for t in tokens) == layout.counts.backward
    assert len(layout.frozen.ids_T) == sum(t.frozen for t in tokens)
    assert layout.counts.executed == sum(t.total for t in tokens)
    assert layout.counts.scored == len(list(scored(layout)))
    assert layout.pair_ids == tuple(p.pair_id for p in pairs)
    assert layout.num_pairs == len(pairs)


@given(drawn_pairs(), st.booleans())
def test_a_shared_prompt_runs_once(batch, share_start):
    pairs, draws = batch
    layout = pack_lanes(pairs, draws, share_prompt=True, share_response_start=share_start)
    run = [*layout.live.ids_T.tolist(), *layout.frozen.ids_T.tolist()]
    apart = pack_lanes(pairs, draws, share_prompt=False, share_response_start=share_start)
    run_apart = [*apart.live.ids_T.tolist(), *apart.frozen.ids_T.tolist()]
    for pair in pairs:
        for token in pair.prompt_ids:
            assert run.count(token) == 1
            assert run_apart.count(token) == 2
        for token in pair.chosen_ids[: pair.shared_start]:
            if share_start:
                assert run.count(token) == 1
    assert len(apart.prompt_rows_C) == 0


@given(drawn_pairs())
def test_captured_rows_are_the_prompts_of_dropped_branches(batch):
    pairs, draws = batch
    layout = pack_lanes(pairs, draws)
    want = []
    for pair, draw in zip(pairs, draws, strict=True):
        if draw.kept == "both":
            continue
        dropped = draw.rejected if draw.kept == "chosen" else draw.chosen
        # Without a token of its own the dropped branch is scored from the prompt alone.
        if len(dropped.positions) and dropped.positions[-1] > pair.shared_start:
            want += [*pair.prompt_ids, *pair.chosen_ids[: pair.shared_start]]
    assert layout.live.ids_T[layout.prompt_rows_C].tolist() == want


@given(drawn_pairs(), options)
def test_boundaries_are_fit_for_the_kernels(batch, options):
    layout = pack_lanes(*batch, **options)
    for lane in (layout.live, layout.frozen):
        segments = lane.segments
        for lens, cu in ((segments.q_lens, segments.cu_seqlens_q), (segments.k_lens, segments.cu_seqlens_k)):
            assert cu.dtype == torch.int32
            assert cu.diff().tolist() == list(lens)
            assert all(n >= 1 for n in lens)
        assert all(q <= k for q, k in zip(segments.q_lens, segments.k_lens, strict=True))
        assert type(segments.max_seqlen_q) is int
        assert type(segments.max_seqlen_k) is int


def test_example_of_a_single_branch():
    pair = pair_of(0, 2, 4, 3, shared=1)
    full = full_draw(4, 3)
    layout = pack_lanes([pair], [PairDraw(full.chosen, full.rejected, "rejected", 0.5)])
    # Prompt 1000 1001, shared start 1100, own rejected 1201 1202, own chosen 1101 1102 1103; last ones not run.
    assert layout.live.ids_T.tolist() == [1000, 1001, 1100, 1201]
    assert layout.frozen.ids_T.tolist() == [1101, 1102]
    assert layout.frozen.positions_T.tolist() == [3, 4]
    assert layout.frozen.segments.k_index.tolist() == [0, 1, 2, 3, 4]
    assert layout.prompt_rows_C.tolist() == [0, 1, 2]
    assert [(r.row_K.tolist(), r.target_K.tolist(), r.slot_K.tolist()) for r in (
        layout.live_rows, layout.detached_rows, layout.frozen_rows)] == [
        ([2, 3], [1201, 1202], [1, 1]),
        ([1, 2], [1100, 1101], [2, 0]),
        ([0, 1], [1102, 1103], [0, 0]),
    ]  # fmt: skip
    assert (layout.counts.executed, layout.counts.scored, layout.counts.backward) == (6, 6, 4)


def test_responses_of_one_token_are_scored_from_the_last_prompt_token():
    pairs = [pair_of(0, 3, 1, 1, 0), pair_of(1, 2, 1, 1, 0)]
    draws = [full_draw(1, 1), PairDraw(full_draw(1, 1).chosen, full_draw(1, 1).rejected, "chosen", 0.5)]
    layout = pack_lanes(pairs, draws)
    assert layout.live.ids_T.tolist() == [1000, 1001, 1002, 2000, 2001]
    assert len(layout.frozen.ids_T) == 0
    # Second pair's first token is predicted by row 4, its own prompt's last row.
    assert layout.live_rows.row_K.tolist() == [2, 2, 4]
    assert layout.live_rows.target_K.tolist() == [1100, 1200, 2100]
    assert layout.detached_rows.row_K.tolist() == [4]
    assert layout.detached_rows.target_K.tolist() == [2200]


def test_empty_samples_run_the_prompt_and_score_nothing():
    nothing = BranchDraw(2, np.zeros(0, np.int64), np.zeros(0))
    layout = pack_lanes([pair_of(0, 3, 4, 4, 0)], [PairDraw(nothing, nothing, "both", 1.0)])
    assert layout.live.ids_T.tolist() == [1000, 1001, 1002]
    assert layout.counts.scored == 0
    assert layout.num_pairs == 1


def test_no_pairs_give_a_dummy_that_counts_nothing():
    layout = pack_lanes([], [])
    assert layout.live.ids_T.tolist() == [0]
    assert layout.live.positions_T.tolist() == [0]
    assert layout.live.segments.q_lens == layout.live.segments.k_lens == (1,)
    assert len(layout.frozen.ids_T) == len(layout.prompt_rows_C) == 0
    assert layout.frozen.segments.cu_seqlens_q.tolist() == [0]
    assert layout.num_pairs == 0
    assert (layout.counts.executed, layout.counts.scored, layout.counts.backward) == (0, 0, 0)
    assert not list(scored(layout))


def test_one_draw_a_pair():
    with pytest.raises(ValueError, match="1 pairs but 0 draws"):
        pack_lanes([pair_of(0, 1, 1, 1, 0)], [])


@given(drawn_pairs())
def test_moving_a_layout_keeps_every_value(batch):
    layout = pack_lanes(*batch)
    moved = layout.to("meta")
    assert moved.live.ids_T.device.type == moved.frozen_rows.weight_K.device.type == "meta"
    for lane in (moved.live, moved.frozen):
        assert lane.segments.cu_seqlens_q.device.type == lane.segments.cu_seqlens_k.device.type == "meta"
        assert lane.segments.k_index is None or lane.segments.k_index.device.type == "meta"
    assert moved.live.segments.q_lens == layout.live.segments.q_lens
    assert moved.pair_ids == layout.pair_ids
    assert moved.counts == layout.counts
    same = layout.to("cpu")
    assert torch.equal(same.live.ids_T, layout.live.ids_T)
