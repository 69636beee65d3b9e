"""Align a causal LM with preference pairs.

deepspeed launch/train.py --config launch/recipes/quickstart.yaml [--key value ...]

Also under torchrun and plain python. `--help` lists every setting; `--dry_run` prints the plan and its sizes, and ends.
Exit codes are those of `ds_stochdpo/errors.py`.
"""

import logging
import os
import signal
import sys


def main() -> int:
    """Run the command line; returns the exit code."""
    # Until the guard takes them, so that no thread of a library is interrupted: imports below start some.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    from transformers.utils import logging as transformers_logging

    from ds_stochdpo.job import Guard, check_launch
    from ds_stochdpo.planning import dry_run
    from ds_stochdpo.train import parse_settings, run_training

    rank = int(os.environ.get("RANK", "0"))
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING,
        format=f"%(asctime)s [rank {rank}] %(message)s",
        datefmt="%H:%M:%S",
    )
    if rank != 0:
        # Every rank gets the same rows; one account of them is enough.
        for name in ("rows", "dataset"):
            logging.getLogger(f"ds_stochdpo.data.{name}").setLevel(logging.ERROR)
    if rank != 0 or not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    guard = Guard()
    guard.start()
    try:
        guard.meet()
        config = parse_settings(sys.argv[1:])
        if config.dry_run:
            plan = dry_run(config)
            if rank == 0:
                print(plan)
            return 0
        check_launch()
        run_training(config, guard)
    except Exception as error:
        return guard.end(error)
    guard.finish()
    return 0


if __name__ == "__main__":
    code = main()
    if code:
        # An interpreter that shuts down takes seconds; a launcher that ends a job kills after 30 of them.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
