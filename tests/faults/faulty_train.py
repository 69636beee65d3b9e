"""launch/train.py with one thing going wrong: FAULT=what FAULT_RANK=r FAULT_STEP=n [STEP_S=seconds a step takes]."""

import os
import runpy
import shutil
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def happen(what):
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "raise":
        raise RuntimeError("deliberately broken step")
    elif what == "hang":
        sleep_for_ever()
    elif what == "fill":
        fill_disk(Path("disk"))


def fill_disk(disk):
    """Leave room for the bytes of the last checkpoint: the next one needs more, since files take whole pages."""
    from ds_stochdpo.engine.completeness import folder_bytes

    page = os.sysconf("SC_PAGE_SIZE")
    room = -(-folder_bytes(disk / "run" / "checkpoint-1") // page) * page
    (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - room))


def sleep_for_ever():
    time.sleep(3600)


def main():
    what, rank, step = (os.environ.get(f"FAULT{part}") for part in ("", "_RANK", "_STEP"))
    is_here = what is not None and os.environ["RANK"] == rank
    if not is_here and "STEP_S" not in os.environ:
        return
    from ds_stochdpo.model import TwoLaneModel

    inner, calls = TwoLaneModel.forward, 0

    def forward(self, *args, **kwargs):
        # In the middle of a step: the other rank is, or will soon be, in a collective.
        nonlocal calls
        calls += self.training
        print(f"pid {os.getpid()} rank {os.environ.get('RANK')} in step {calls}", flush=True)
        # After the word, so that who waits for it can act while the step is under way.
        time.sleep(float(os.environ.get("STEP_S", "0")))
        if is_here and calls == int(step):
            happen(what)
        return inner(self, *args, **kwargs)

    TwoLaneModel.forward = forward


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    main()
    sys.argv[0] = str(ROOT / "launch" / "train.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
