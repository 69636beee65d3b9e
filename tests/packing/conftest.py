"""Property tests draw the same examples on every machine, and may be slow on a busy one."""

from hypothesis import settings

settings.register_profile("ds_stochdpo", deadline=None, derandomize=True)
settings.load_profile("ds_stochdpo")
