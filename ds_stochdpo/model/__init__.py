"""The model side: attention seam, two-lane layers and chunked scoring, on top of transformers."""

from ds_stochdpo.model.attention import choose_backend
from ds_stochdpo.model.families import FAMILIES, family_of, family_of_config
from ds_stochdpo.model.rehearsal import StepMemory, rehearsal_backend, rehearse_lanes, rehearse_stock
from ds_stochdpo.model.scoring import ScoringHead, ScoringOptions, chunked_logps
from ds_stochdpo.model.two_lane import TwoLaneModel

__all__ = [
    "FAMILIES",
    "ScoringHead",
    "ScoringOptions",
    "StepMemory",
    "TwoLaneModel",
    "choose_backend",
    "chunked_logps",
    "family_of",
    "family_of_config",
    "rehearsal_backend",
    "rehearse_lanes",
    "rehearse_stock",
]
