"""The process group, and the few collectives that are not DeepSpeed's. Entry: `process_group`, `Ranks`.

Every function here that says "collective" must be entered by all ranks, in the same order, whatever they drew.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_stochdpo.engine.compiled_ops import skip_cpu_comm_build
from ds_stochdpo.errors import StochDPOError

logger = logging.getLogger(__name__)
# DeepSpeed 0.19.8 calls two collectives by names that torch 2.13 renames, at every step; nothing a user could change.
warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning, r"torch\.distributed")

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
JOIN_TIMEOUT = timedelta(days=1)
"""Wait for the other ranks to come: those of a machine that has still to tokenise may come hours after the others."""
_SECONDS_BETWEEN_LOOKS = 0.1
_T = TypeVar("_T")
_calls = itertools.count()
"""Ranks make the same calls in the same order, so that a count names each of them everywhere."""


def _single_process_defaults() -> None:
    """Let plain `python` start: DeepSpeed would look for MPI without these."""
    if "RANK" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    defaults = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for key, value in defaults.items():
        os.environ.setdefault(key, value)


def start_process_group(timeout: timedelta = COLLECTIVE_TIMEOUT) -> None:
    """Join the job's process group, or make one of a single process. Collective; does nothing if it exists.

    Args:
        timeout: Longest wait in one collective before the job ends with an error. Joining may take longer.
    """
    _single_process_defaults()
    skip_cpu_comm_build()
    if not dist.is_initialized():
        # A gloo process whose group still stands aborts at random on exit.
        atexit.register(_end_process_group)
        if int(os.environ["WORLD_SIZE"]) > 1:
            place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            logger.info("waiting for all %s ranks at %s", os.environ["WORLD_SIZE"], place)
        deepspeed.init_distributed(timeout=JOIN_TIMEOUT, verbose=False)
        _limit_collectives(timeout)
        if get_accelerator().device_name() != "cpu":
            get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))


def _limit_collectives(timeout: timedelta) -> None:
    """Torch has one timeout for joining and for collectives, and its setter passes over groups that are debugged."""
    group = dist.distributed_c10d._get_default_group()
    for device in group._device_types:
        backend: Any = group._get_backend(device)
        # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps the backend into one that checks every call.
        getattr(backend, "wrapped_pg", backend)._set_default_timeout(timeout)


def _end_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def process_group(timeout: timedelta = COLLECTIVE_TIMEOUT) -> Iterator[Ranks]:
    """The job's process group for the time of a block; destroyed at its end, whatever happens.

    Without that end a gloo process aborts at random on exit. After an error no further collective is entered, since
    the other ranks may be anywhere.
    """
    start_process_group(timeout)
    try:
        yield Ranks()
        dist.barrier()
    finally:
        _end_process_group()


class Ranks:
    """This process among the others."""

    @property
    def rank(self) -> int:
        """Number of this process."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return dist.get_world_size()

    @property
    def is_main(self) -> bool:
        """Whether this process writes logs and files."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this process writes what each node keeps for itself."""
        return int(os.environ.get("LOCAL_RANK", "0")) == 0

    @property
    def device(self) -> torch.device:
        """Device of this process."""
        name = get_accelerator().device_name()
        return torch.device("cpu") if name == "cpu" else torch.device(get_accelerator().current_device_name())

    def sum(self, values: Tensor) -> Tensor:
        """Sum over ranks, in place. Collective."""
        dist.all_reduce(values)
        return values

    def max(self, values: Tensor) -> Tensor:
        """Maximum over ranks, in place. Collective."""
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def rows(self, values: list[int]) -> list[list[int]]:
        """The given whole numbers of every rank. Collective."""
        own = torch.tensor(values, dtype=torch.int64, device=self.device)
        gathered = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(gathered, own)
        return [row.tolist() for row in gathered]

    def gather_objects(self, item: Any) -> list[Any]:
        """The given picklable object of every rank. Collective."""
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, item)
        return gathered

    def from_main(self, item: Any) -> Any:
        """Rank 0's object, on every rank. Collective."""
        box = [item]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def on_main(self, work: Callable[[], _T], *, may_take_long: bool = True) -> _T:
        """Rank 0 does `work`; its result, or its StochDPOError, reaches every rank. Collective.

        Args:
            work: What rank 0 does.
            may_take_long: The others wait outside of any collective, so that the time limit of one does not count. Else
                they wait in one, and a rank 0 that hangs is found out.
        """
        key = f"ds_stochdpo/on_main/{next(_calls)}"
        store = dist.distributed_c10d._get_default_store()
        outcome: Any = None
        if self.is_main:
            try:
                outcome = (True, work())
            except StochDPOError as error:
                outcome = (False, error)
            finally:
                store.set(key, "done")
        elif may_take_long:
            while not store.check([key]):
                time.sleep(_SECONDS_BETWEEN_LOOKS)
        has_worked, value = self.from_main(outcome)
        if not has_worked:
            raise value
        return value

    def barrier(self) -> None:
        """Wait for every rank. Collective."""
        dist.barrier()


def peak_memory_gib() -> float:
    """Peak memory of this process: device allocations, or resident set size on CPU, in GiB."""
    if get_accelerator().device_name() != "cpu":
        return get_accelerator().max_memory_allocated() / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
