"""What the ranks tell each other when one of them fails, past any collective. Entry: `FaultBoard.open`.

A key-value store beside the process group: a rank that fails can write to it whatever the others are doing, and they
can read it while they wait in a collective.
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ds_stochdpo.errors import LaunchError

START_TIMEOUT_S = 300.0
"""Longest wait for rank 0 to be there."""
REPLY_TIMEOUT = timedelta(seconds=5)


@dataclass(frozen=True)
class Fault:
    """Why a run ends.

    Attributes:
        rank: Who says so.
        code: Exit code of all ranks.
        text: One sentence.
        gone: Ranks that no longer answer.
    """

    rank: int
    code: int
    text: str
    gone: tuple[int, ...] = ()


class FaultBoard:
    """Notes of all ranks. Its methods raise `torch.distributed.DistError` where rank 0, which keeps it, is gone."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store, self.rank, self.world_size = store, rank, world_size
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._prefix = f"ds_stochdpo/{attempt}/"

    @classmethod
    def open(cls) -> FaultBoard | None:
        """Join the board at MASTER_ADDR:MASTER_PORT, which rank 0 opens unless torchrun has; None for a single process.

        Ranks wait for rank 0, at most `START_TIMEOUT_S`; then the process ends.

        Raises:
            LaunchError: If the port is in use, or rank 0 cannot be reached.
        """
        world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
        if world_size == 1:
            return None
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        is_owner = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        # A stranger that listens there never answers, and torch 2.13 then waits without an end.
        timer = threading.Timer(START_TIMEOUT_S, _give_up, [rank, host, port])
        timer.daemon = True
        timer.start()
        try:
            # The process group later shares this server, for which `multi_tenant` is there.
            store = dist.TCPStore(  # type: ignore[attr-defined]
                host,
                port,
                is_master=is_owner,
                wait_for_workers=False,
                multi_tenant=True,
                timeout=timedelta(seconds=START_TIMEOUT_S),
            )
        except dist.DistError as error:
            if is_owner:
                raise LaunchError(
                    f"rank 0 cannot listen on {host}:{port}, the job's master port: "
                    f"{'it is in use' if 'EADDRINUSE' in str(error) else str(error).splitlines()[0]}. "
                    "Name a free one with --master_port, before the script's name."
                ) from None
            raise LaunchError(
                f"rank {rank} cannot reach rank 0 at {host}:{port} ({str(error).splitlines()[0]}); "
                "is that the address of the first machine, and may its port be reached?"
            ) from None
        finally:
            timer.cancel()
        store.set_timeout(REPLY_TIMEOUT)
        return cls(store, rank, world_size)

    @property
    def is_kept_here(self) -> bool:
        """Whether the notes of all are lost when this process ends."""
        return self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    def claim(self, fault: Fault) -> Fault:
        """Name the cause of the end; the first rank to do so wins. Returns the cause that stands."""
        mine = json.dumps(asdict(fault))
        return _fault(self._store.compare_set(self._prefix + "cause", "", mine))

    def cause(self) -> Fault | None:
        """The cause of the end, once a rank has named it."""
        key = self._prefix + "cause"
        return _fault(self._store.get(key)) if self._store.check([key]) else None

    def sign(self, what: str, text: str = "") -> None:
        """Leave a note of this rank."""
        self._store.set(f"{self._prefix}{what}/{self.rank}", text)
        self._store.set(f"{self._prefix}{what}", "")

    def is_signed(self, what: str) -> bool:
        """Whether any rank left a note of this kind."""
        return bool(self._store.check([f"{self._prefix}{what}"]))

    def signed(self, what: str) -> dict[int, str]:
        """Notes of this kind by rank."""
        keys = {rank: f"{self._prefix}{what}/{rank}" for rank in range(self.world_size)}
        return {r: self._store.get(key).decode() for r, key in keys.items() if self._store.check([key])}


def _fault(raw: bytes) -> Fault:
    values = json.loads(raw)
    return Fault(values["rank"], values["code"], values["text"], tuple(values["gone"]))


def _give_up(rank: int, host: str, port: int) -> None:
    text = (
        f"error [rank {rank}]: no answer from rank 0 at {host}:{port} for {START_TIMEOUT_S:.0f} s; is that the address "
        "of the first machine, and is the port free there?\n"
    )
    os.write(2, text.encode())
    os._exit(LaunchError.exit_code)
