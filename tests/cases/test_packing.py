"""Rows side by side in one lane: positions, boundaries and scores are those of each row alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ds_stochdpo.engine import load_tokenizer
from ds_stochdpo.packing import pack_lanes
from ds_stochdpo.pruning import full_draw
from tests.cases.job import deepspeed_json
from tests.oracle import branch_logps
from tests.tiny import pair_rows

LONG = {"prompt": "Name one." + " Green" * 30, "chosen": "Pear.", "rejected": "No idea."}
UNEVEN = [
    {"prompt": "Hi", "chosen": "Yes", "rejected": "No idea at all."},
    {"prompt": "Name one colour.", "chosen": "Blue" + " Blue" * 12, "rejected": "x"},
    {"prompt": "Q", "chosen": "y", "rejected": "n"},
]


def with_kept(pairs, kept):
    return [replace(full_draw(len(p.chosen_ids), len(p.rejected_ids)), kept=kept) for p in pairs]


@pytest.mark.parametrize("share_prompt", [True, False], ids=["shared", "apart"])
@pytest.mark.parametrize("model", ["gpt2", "wide"])
def test_rows_of_a_lane_score_as_each_row_alone(jobs, model, share_prompt):
    """Two lanes of two rows; the first row was cut from the left, so that its ids do not begin where its text does."""
    rows = [LONG, *UNEVEN]
    settings = {"max_length": 40, "per_device_eval_batch_size": 2, "share_prompt": share_prompt, "reference": "none"}
    engine, pairs = jobs.engine(model, rows, deepspeed_json(0), **settings)
    whole = jobs.pairs(jobs.config(model, rows))
    assert len(pairs[0].prompt_ids) < len(whole[0].prompt_ids)
    lm = AutoModelForCausalLM.from_pretrained(jobs.folder / model).eval()
    for pair, scores in zip(pairs, engine.score(pairs), strict=True):
        for got, response in ((scores.chosen_logps, pair.chosen_ids), (scores.rejected_logps, pair.rejected_ids)):
            with torch.no_grad():
                want = branch_logps(lm, pair.prompt_ids, response).numpy()
            assert got == pytest.approx(want, abs=1e-5)


def test_two_copies_of_a_row_score_alike_under_learned_positions(jobs):
    engine, (pair,) = jobs.engine("gpt2", UNEVEN[1:2], deepspeed_json(0), reference="none")
    copies = [pair, replace(pair, pair_id=1)]
    layout = pack_lanes(copies, with_kept(copies, "both"))
    starts = np.flatnonzero(layout.live.positions_T == 0)
    assert len(starts) == 2
    first, second = engine.score(copies)
    assert first.chosen_logps == pytest.approx(second.chosen_logps, abs=1e-6)
    assert first.rejected_logps == pytest.approx(second.rejected_logps, abs=1e-6)


@pytest.mark.parametrize("kept", ["both", "chosen", "rejected"])
def test_scored_tokens_of_each_row_decode_to_its_responses(jobs, kept):
    """Whichever branch comes first in the lane, and beside rows of other lengths."""
    config = jobs.config("llama", UNEVEN)
    tokenizer, pairs = load_tokenizer(config.model_name_or_path), jobs.pairs(config)
    layout = pack_lanes(pairs, with_kept(pairs, kept), share_response_start=False)
    groups = (layout.live_rows, layout.detached_rows, layout.frozen_rows)
    slot, position, target = (
        np.concatenate([getattr(g, name).numpy() for g in groups]) for name in ("slot_K", "position_K", "target_K")
    )
    for index, row in enumerate(UNEVEN):
        for branch, side in enumerate(("chosen", "rejected")):
            mine = slot == 3 * index + branch
            ids = target[mine][np.argsort(position[mine])]
            assert tokenizer.decode(ids) == f"{row[side]}<|im_end|>", (row, side)


def test_a_lane_holds_the_tokens_of_its_rows_and_no_padding(jobs):
    """So no boundary can be read out of padding: as many segments as there are runs of queries, one a response."""
    pairs = jobs.pairs(jobs.config("llama", UNEVEN + pair_rows(5)))
    pad = load_tokenizer(str(jobs.folder / "llama")).pad_token_id
    for share_prompt, runs in ((True, 2), (False, 2)):
        layout = pack_lanes(pairs, with_kept(pairs, "both"), share_prompt=share_prompt, share_response_start=False)
        live = layout.live
        assert len(live.segments.q_lens) == runs * len(pairs) - sum(
            share_prompt and len(p.rejected_ids) == 1 for p in pairs
        )
        prompts = 1 if share_prompt else 2
        # The last token of a response is never an input.
        inputs = sum(prompts * len(p.prompt_ids) + len(p.chosen_ids) + len(p.rejected_ids) - 2 for p in pairs)
        assert len(live.ids_T) == inputs == int(live.segments.cu_seqlens_q[-1])
        assert inputs % 64
        assert pad not in live.ids_T.tolist()


def test_segments_of_one_token_run_and_empty_ones_are_left_out(jobs):
    """Prompts of 1, 1 and 9 tokens with responses of one token: what is run is the prompt alone."""
    engine, pairs = jobs.engine("wide", UNEVEN, deepspeed_json(0), reference="none")
    short = [
        replace(pair, prompt_ids=np.resize(pair.prompt_ids, size), chosen_ids=pair.chosen_ids[:1],
                rejected_ids=pair.rejected_ids[-1:])
        for pair, size in zip(pairs, (1, 1, 9), strict=True)
    ]  # fmt: skip
    for kept in ("both", "chosen"):
        layout = pack_lanes(short, with_kept(short, kept))
        assert layout.live.segments.q_lens == (1, 1, 9)
        assert layout.frozen.segments.q_lens == ()
    lm = AutoModelForCausalLM.from_pretrained(jobs.folder / "wide").eval()
    for pair, scores in zip(short, engine.score(short), strict=True):
        with torch.no_grad():
            want = branch_logps(lm, pair.prompt_ids, pair.chosen_ids).numpy()
        assert scores.chosen_logps == pytest.approx(want, abs=1e-5)


def test_the_attention_backend_is_said_once(jobs, caplog):
    caplog.set_level("INFO")
    jobs.engine("llama", UNEVEN, deepspeed_json(0), reference="none")
    assert [r.getMessage() for r in caplog.records if "attention backend" in r.getMessage()] == [
        "attention backend: sdpa"
    ]
