"""Which software this process runs: what a record names, and what the ranks of a job must have in common."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path

_PACKAGES = ("ds_stochdpo", "torch", "deepspeed", "transformers", "datasets", "safetensors", "flash_attn")


def versions() -> dict[str, str]:
    """Installed versions of what decides a run's numbers."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Commit of the source tree this package runs from; None outside a git checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
