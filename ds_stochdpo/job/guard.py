"""Signals, hangs and failures of one rank and of the others. Entry: `Guard`.

Whatever ends a run, every rank ends, all with the same exit code, and the rank that knows the cause speaks last.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

import torch.distributed as dist

from ds_stochdpo.engine.board import Fault, FaultBoard
from ds_stochdpo.errors import EXIT_HANG, EXIT_SIGNAL, EXIT_UNEXPECTED, StochDPOError
from ds_stochdpo.job.ending import Ending, lost_text, speak
from ds_stochdpo.job.launcher import find_launchers

logger = logging.getLogger(__name__)

SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})
TICK_S = 1.0
UNWIND_S = 3.0
"""A rank that learns of a failure elsewhere has this long to end by its own error, which closes files on the way."""
STATE_WAIT_S = 8.0
"""In a hang, ranks have this long to say where they are."""
FROZEN_S = 45.0
"""A process that cannot even run the thread that watches it ends by itself this much later."""
_COLLECTIVE_FILES = ("torch/distributed/", "deepspeed/comm/")
_WAIT_DEPTH = 3
_LOST_PEER_WORDS = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


class Guard:
    """Watches over this rank. It takes the signals of the whole process, so a program makes one at most.

    Attributes:
        wanted: Number of the signal on which this rank wants to stop; 0: none.
        can_finish: Whether a first signal waits for the end of the optimizer step. Before training there is nothing to
            keep, and it ends the process at once.
    """

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.wanted = 0
        self.can_finish = False
        self._ending = Ending(self.rank)
        self._is_ending = threading.Lock()
        self._timeout_s = 0.0
        self._last_beat: float | None = None
        self._presses = 0
        self._launchers = {launcher.pid for launcher in find_launchers()}

    def start(self) -> None:
        """Take SIGINT and SIGTERM, and watch the launcher. Call it before anything else starts a thread."""
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        # A forked worker has no such thread, and must end when its pool says so.
        os.register_at_fork(after_in_child=_give_signals_back)
        _run(self._take_signals)
        if self._launchers:
            _run(self._watch_launchers)

    def meet(self) -> None:
        """Join the other ranks' board; from now on this rank ends when another one fails.

        Raises:
            LaunchError: If the master port is in use or rank 0 cannot be reached.
        """
        board = FaultBoard.open()
        if board is not None:
            board.sign("who", f"process {os.getpid()} on {socket.gethostname()}")
            self._ending.board = board
            _run(self._listen)

    def watch_for_hangs(self, timeout_s: float) -> None:
        """Count a rank as hanging after so many seconds without a beat; 0: never."""
        self._timeout_s = timeout_s
        if timeout_s:
            _run(self._watch_beats)

    def beat(self) -> None:
        """A micro-batch begins; from now on too long a silence is a hang."""
        self._last_beat = time.monotonic()
        if self._timeout_s:
            faulthandler.dump_traceback_later(self._timeout_s + FROZEN_S, exit=True)

    def rest(self) -> None:
        """What comes next may take any time."""
        self._last_beat = None
        faulthandler.cancel_dump_traceback_later()

    def finish(self) -> None:
        """This rank has ended well."""
        self.rest()
        self._ending.goodbye()

    def end(self, error: BaseException) -> int:
        """End after an error: agree on the cause with the other ranks, say it, and return the exit code."""
        self._begin_to_end()
        self.rest()
        if not isinstance(error, StochDPOError) and not self._is_lost_peer(error):
            traceback.print_exception(error)
        code = getattr(error, "exit_code", EXIT_UNEXPECTED)
        return self._ending.settle(None if self._is_lost_peer(error) else Fault(self.rank, code, _sentence(error)))

    def _is_lost_peer(self, error: BaseException) -> bool:
        """Whether this rank only noticed that another one is gone."""
        if self._ending.board is None or isinstance(error, StochDPOError):
            return False
        is_broken = isinstance(error, RuntimeError) and any(word in str(error) for word in _LOST_PEER_WORDS)
        return is_broken or isinstance(error, dist.DistError)

    def _take_signals(self) -> None:
        while True:
            info = signal.sigwaitinfo(SIGNALS)
            # torchrun passes Ctrl-C on to ranks that the terminal has told already: that is no second one.
            self._presses += info.si_signo == signal.SIGINT and info.si_pid not in self._launchers
            self._on_signal(info.si_signo, signal.Signals(info.si_signo).name)

    def _watch_launchers(self) -> None:
        poller = select.poll()
        try:
            for pid in self._launchers:
                poller.register(os.pidfd_open(pid), select.POLLIN)
            poller.poll()
        except ProcessLookupError:
            # It ended while this rank started.
            pass
        except OSError as error:
            logger.warning("the launcher cannot be watched (%s): this rank may outlive it", error)
            return
        # The first process of deepspeed passes no signal on; without it nobody would wait for this rank.
        self._on_signal(signal.SIGTERM, "the launcher has ended, which counts as SIGTERM")

    def _on_signal(self, signum: int, name: str) -> None:
        code = EXIT_SIGNAL + signum
        if self._presses > 1:
            # Whatever has come since, such as the end of the launcher, which Ctrl-C reaches too.
            code = EXIT_SIGNAL + signal.SIGINT
            own = Fault(self.rank, code, "SIGINT twice: ended at once; checkpoints that were complete still are")
            if self._ending.claim(own, limit_s=TICK_S):
                speak(f"stopped [rank {self.rank}]: {own.text}")
            os._exit(code)
        if not self.can_finish:
            self._leave(Fault(self.rank, code, f"{name} before training began: there is nothing to save"))
        if not self.wanted:
            self.wanted = int(signum)
            logger.warning("%s: stopping after this optimizer step", name)

    def _listen(self) -> None:
        board = self._ending.board
        assert board is not None
        while True:
            time.sleep(TICK_S)
            try:
                has_cause, has_hang = board.cause() is not None, board.is_signed("state")
            except dist.DistError:
                # Rank 0 has ended. If that is a failure, this rank's next collective fails, or its clock rings.
                return
            if has_cause:
                time.sleep(UNWIND_S)
                self._leave(None)
            if has_hang:
                self._end_hang()

    def _watch_beats(self) -> None:
        while True:
            time.sleep(min(TICK_S, self._timeout_s / 4))
            beat = self._last_beat
            if beat is not None and time.monotonic() - beat > self._timeout_s:
                self._end_hang()

    def _end_hang(self) -> NoReturn:
        self._begin_to_end()
        stack = sys._current_frames()[threading.main_thread().ident or 0]
        note = {"waits": _waits_for_others(), "place": _place(stack)}
        notes = self._ending.exchange("state", json.dumps(note), STATE_WAIT_S)
        states = {rank: json.loads(text) for rank, text in notes.items()}
        late = [rank for rank, state in states.items() if not state["waits"]]
        if self.rank in late:
            text = "".join(traceback.format_stack(stack))
            speak(f"stack of rank {self.rank}, which is late:\n{text}")
        self._exit(self._hang_fault(states, late))

    def _hang_fault(self, states: dict[int, Any], late: list[int]) -> Fault:
        board = self._ending.board
        head = f"no micro-batch was finished for {self._timeout_s:g} s (step_timeout_s)"
        gone = tuple(r for r in range(board.world_size) if r not in states) if board else ()
        parts = [f"rank {r} is late, at {states[r]['place']}; its stack is above" for r in late]
        if gone and board is not None and self.rank == 0:
            parts.append(lost_text(board, gone))
        elif gone:
            parts.append(f"no answer from rank {', '.join(map(str, gone))}: its machine or the network is down")
        if waiting := sorted(set(states) - set(late)):
            parts.append(f"waiting in a collective: rank {', '.join(map(str, waiting))}")
        return Fault(self.rank, EXIT_HANG, f"{head}. " + ". ".join(parts), gone)

    def _begin_to_end(self) -> None:
        """Only one thread ends the process; any other that comes here sleeps until it is over."""
        while not self._is_ending.acquire(blocking=False):
            time.sleep(TICK_S)

    def _leave(self, own: Fault | None) -> NoReturn:
        self._begin_to_end()
        self._exit(own)

    def _exit(self, own: Fault | None) -> NoReturn:
        code = self._ending.settle(own)
        os._exit(code)


def _give_signals_back() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _run(target: Callable[[], None]) -> None:
    threading.Thread(target=target, daemon=True, name=target.__name__).start()


def _sentence(error: BaseException) -> str:
    return str(error) if isinstance(error, StochDPOError) else f"{type(error).__name__}: {error}".strip(": \n")


def _waits_for_others() -> bool:
    """Whether a thread of this process stands in a collective."""
    own = {thread.ident for thread in threading.enumerate() if thread.daemon}
    for ident, innermost in sys._current_frames().items():
        if ident in own:
            continue
        codes = [frame.f_code for frame, _ in traceback.walk_stack(innermost)]
        if any(part in code.co_filename for code in codes for part in _COLLECTIVE_FILES):
            return True
        # DeepSpeed waits for a collective that runs beside the computation in methods of that name.
        if any("wait" in code.co_name and "deepspeed" in code.co_filename for code in codes[:_WAIT_DEPTH]):
            return True
    return False


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
