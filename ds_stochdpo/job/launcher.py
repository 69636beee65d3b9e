"""Who started this process: `deepspeed` or `torchrun`, found among its parents. Entry: `find_launchers`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_PROGRAMS = ("deepspeed", "ds", "torchrun")
_MODULES = (
    "deepspeed.launcher.launch",
    "deepspeed.launcher.runner",
    "torch.distributed.run",
    "torch.distributed.launch",
)


@dataclass(frozen=True)
class Launcher:
    """A launcher process above this one.

    Attributes:
        pid: Its process id.
        command: Its command line.
        folder: Its working folder, or None where that cannot be read.
    """

    pid: int
    command: tuple[str, ...]
    folder: Path | None


def find_launchers() -> list[Launcher]:
    """Launchers among the parents, the nearest first; none for a process that was started by itself."""
    found: list[Launcher] = []
    pid = os.getppid()
    while pid > 1:
        try:
            raw = Path(f"/proc/{pid}/cmdline").read_bytes()
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            break
        command = tuple(part.decode(errors="replace") for part in raw.split(b"\0")[:-1])
        if not is_launcher(command):
            break
        try:
            folder = Path(os.readlink(f"/proc/{pid}/cwd"))
        except OSError:
            folder = None
        found.append(Launcher(pid, command, folder))
        pid = parent
    return found


def is_launcher(command: Sequence[str]) -> bool:
    """Whether a command line is that of a launcher; what it launches does not count."""
    is_python = Path(command[0]).name.startswith("python") if command else False
    programs = [part for part in command[is_python:] if not part.startswith("-")]
    return bool(programs) and (Path(programs[0]).name in _PROGRAMS or programs[0] in _MODULES)
