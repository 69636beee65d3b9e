"""Random pairs and draws; a token occurs once in a pair unless both responses share it, so leaks show."""

import numpy as np
from hypothesis import strategies as st

from ds_stochdpo.data.pair import PreferencePair
from ds_stochdpo.pruning.draws import BranchDraw, PairDraw, full_draw

SPAN = 1000


def pair_of(pair_id, num_prompt, num_chosen, num_rejected, shared, refs=True):
    """A pair whose responses begin with `shared` equal tokens; token numbers tell pair, part and position."""
    base = SPAN * (pair_id + 1)
    chosen = base + 100 + np.arange(num_chosen)
    rejected = base + 200 + np.arange(num_rejected)
    rejected[:shared] = chosen[:shared]
    ref = [(-r / SPAN).astype(np.float32) if refs else None for r in (chosen, rejected)]
    return PreferencePair(pair_id, base + np.arange(num_prompt), chosen, rejected, "", *ref)


@st.composite
def pairs(draw, pair_id, refs=True):
    num_prompt, num_chosen, num_rejected = (draw(st.integers(1, 6)) for _ in range(3))
    shortest = min(num_chosen, num_rejected)
    # Equal responses do not occur, but one may be the start of the other.
    most = shortest if num_chosen != num_rejected else shortest - 1
    return pair_of(pair_id, num_prompt, num_chosen, num_rejected, draw(st.integers(0, most)), refs)


@st.composite
def branch_draws(draw, length):
    prefix = draw(st.integers(1, length))
    kept = [t for t in range(prefix) if draw(st.booleans())]
    weights = [1.0 + t / 8 for t in kept]
    return BranchDraw(prefix, np.array(kept, np.int64), np.array(weights))


@st.composite
def drawn_pairs(draw, max_pairs=4):
    """(pairs, draws) of one micro-batch."""
    count = draw(st.integers(1, max_pairs))
    batch = [draw(pairs(i, draw(st.booleans()))) for i in range(count)]
    draws = []
    for pair in batch:
        kept = draw(st.sampled_from(["both", "chosen", "rejected"]))
        prob = 1.0 if kept == "both" else 0.5
        lengths = (len(pair.chosen_ids), len(pair.rejected_ids))
        if draw(st.integers(0, 3)) == 0:
            full = full_draw(*lengths)
            draws.append(PairDraw(full.chosen, full.rejected, kept, prob))
        else:
            draws.append(PairDraw(*(draw(branch_draws(n)) for n in lengths), kept, prob))
    return batch, draws
