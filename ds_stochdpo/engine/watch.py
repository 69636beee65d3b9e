"""What the engine tells whoever watches it, and is told by: progress and the wish to stop. Entry: `Watch`."""

from __future__ import annotations

from typing import Protocol


class Watch(Protocol):
    """A watcher of one rank."""

    @property
    def wanted(self) -> int:
        """Number of the signal on which this rank wants to stop; 0: none."""

    def beat(self) -> None:
        """A micro-batch begins; from now on too long a silence is a hang."""

    def rest(self) -> None:
        """What comes next may take any time."""


class NoWatch:
    """Nobody watches."""

    wanted = 0

    def beat(self) -> None:
        """Do nothing."""

    def rest(self) -> None:
        """Do nothing."""
