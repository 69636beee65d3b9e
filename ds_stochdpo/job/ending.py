"""How the ranks agree on why a run ends, so that the rank that knows the cause speaks last. Entry: `Ending.settle`.

Nothing here is a collective: the ranks use the board (`engine/board.py`), which can be read and written while a
collective never returns.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ds_stochdpo.engine.board import Fault, FaultBoard
from ds_stochdpo.errors import EXIT_LOST, EXIT_SIGNAL

CAUSE_WAIT_S = 5.0
"""A rank whose collective broke waits this long for the cause, which another rank may know."""
SILENCE_WAIT_S = 2.0
"""After that, ranks that are still there have this long to say so."""
REPLY_WAIT_S = 8.0
"""Ranks that are still there have this long to say goodbye before the cause is printed."""
BOARD_WAIT_S = 20.0
"""Longest time for all of it, where the machine that keeps the board no longer answers."""
_POLL_S = 0.1


class Ending:
    """The last words of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.board: FaultBoard | None = None

    def settle(self, own: Fault | None) -> int:
        """Agree on one cause, say what this rank has to say, and return the exit code of all ranks.

        Args:
            own: What this rank knows; None if it only saw that another one is gone.
        """
        if self.board is None:
            assert own is not None
            _say(own, own.text)
            return own.code
        cause = bounded(lambda: self._agree(own), BOARD_WAIT_S)
        if cause is None:
            address = "rank 0, by which the ranks would agree on the cause, is gone or cannot be reached"
            cause = own or Fault(
                self.rank, EXIT_LOST, f"{address}: killed, out of memory, or its machine or network down"
            )
            _say(cause, cause.text)
        return cause.code

    def exchange(self, what: str, note: str, wait_s: float) -> dict[int, str]:
        """Notes of all ranks that answer in time; only this rank's where the board cannot be reached."""
        board = self.board
        if board is None:
            return {self.rank: note}

        def exchange() -> dict[int, str]:
            board.sign(what, note)
            _wait_until(lambda: len(board.signed(what)) == board.world_size, wait_s)
            return board.signed(what)

        return bounded(exchange, wait_s + BOARD_WAIT_S / 2) or {self.rank: note}

    def claim(self, own: Fault, limit_s: float) -> bool:
        """Name the cause without waiting for anyone; whether this rank was the first."""
        board = self.board
        if board is None:
            return True
        cause = bounded(lambda: board.claim(own), limit_s)
        return cause is None or cause.rank == self.rank

    def goodbye(self) -> None:
        """Tell the others that this rank has ended well."""
        board = self.board
        if board is not None:
            bounded(lambda: board.sign("bye"), SILENCE_WAIT_S)

    def _agree(self, own: Fault | None) -> Fault:
        board = self.board
        assert board is not None
        cause = board.claim(own) if own else self._cause_of_others(board)
        if cause.rank == self.rank:
            self._wait_for_goodbyes(board, cause)
            _say(cause, cause.text)
            board.sign("bye")
            return cause
        if own is None or own.text != cause.text:
            if own is not None:
                _say(own, own.text)
            if cause.code < EXIT_SIGNAL:
                speak(f"stopping [rank {self.rank}]: rank {cause.rank} reports the cause")
        board.sign("bye")
        if board.is_kept_here:
            self._wait_for_goodbyes(board, cause)
        return cause

    def _cause_of_others(self, board: FaultBoard) -> Fault:
        board.sign("here")
        _wait_until(lambda: board.cause() is not None, CAUSE_WAIT_S)
        if cause := board.cause():
            return cause
        time.sleep(SILENCE_WAIT_S)
        gone = tuple(sorted(set(range(board.world_size)) - set(board.signed("here"))))
        return board.claim(Fault(self.rank, EXIT_LOST, lost_text(board, gone), gone))

    def _wait_for_goodbyes(self, board: FaultBoard, cause: Fault) -> None:
        others = set(range(board.world_size)) - {self.rank, *cause.gone}
        _wait_until(lambda: others <= set(board.signed("bye")), REPLY_WAIT_S)


def lost_text(board: FaultBoard, gone: tuple[int, ...]) -> str:
    """What is known about ranks that do not answer."""
    who = board.signed("who")
    named = ", ".join(f"rank {rank} ({who.get(rank, 'which never started')})" for rank in gone)
    if not named:
        return "a collective failed, but every rank is there; see the errors above"
    return (
        f"{named} does not answer: killed from outside or out of memory (the kernel log of its machine says so), "
        "stopped, or its machine or network is down"
    )


def bounded(work: Callable[[], Any], limit_s: float) -> Any:
    """What `work` returns; None if it takes too long or the board is gone."""
    box: list[Any] = []

    def run() -> None:
        try:
            box.append(work())
        except dist.DistError:
            return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    return box[0] if box else None


def _wait_until(is_true: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not is_true() and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _say(fault: Fault, text: str) -> None:
    word = "stopped" if fault.code > EXIT_SIGNAL else "error"
    speak(f"{word} [rank {fault.rank}]: {text}")


def speak(text: str) -> None:
    """Write to standard error, after all that was written to standard output."""
    try:
        sys.stdout.flush()
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except OSError:
        # Nobody reads any more: the terminal or the ssh session is gone.
        return
