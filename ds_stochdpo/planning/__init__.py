"""A run before it starts: its work, time, memory and communication, from a model without weights."""

from ds_stochdpo.planning.dry_run import dry_run
from ds_stochdpo.planning.estimate import estimate, plans_for
from ds_stochdpo.planning.estimate_page import estimate_page
from ds_stochdpo.planning.outlook import look_ahead

__all__ = ["dry_run", "estimate", "estimate_page", "look_ahead", "plans_for"]
