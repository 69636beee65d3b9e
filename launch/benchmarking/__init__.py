"""Parts of `launch/bench.py`."""
