"""From preference files to tokenised pairs in training order.

Floor: data, above `pruning` and below `packing`. Entry: `load_pairs`, then `SetWindows`.
"""

from ds_stochdpo.data.dataset import PairSet, load_pairs
from ds_stochdpo.data.order import SetWindows, Window, Windows, epoch_order, step_batches
from ds_stochdpo.data.pair import PreferencePair
from ds_stochdpo.data.stream import PairStream, StreamWindows, open_stream

__all__ = [
    "PairSet",
    "PairStream",
    "PreferencePair",
    "SetWindows",
    "StreamWindows",
    "Window",
    "Windows",
    "epoch_order",
    "load_pairs",
    "open_stream",
    "step_batches",
]
