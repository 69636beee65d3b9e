"""The processes of a job: how they were started, who watches them, and how they end together."""

from ds_stochdpo.job.guard import Guard
from ds_stochdpo.job.launch_checks import check_launch
from ds_stochdpo.job.node_env import check_ranks_agree
from ds_stochdpo.job.software import commit, versions

__all__ = ["Guard", "check_launch", "check_ranks_agree", "commit", "versions"]
