"""Align a causal LM with preference pairs.

deepspeed launch/train.py --config launch/recipes/quickstart.yaml [--key value ...]

Also under torchrun and plain python. `--help` lists every setting; `--dry_run` prints the plan and its sizes, and ends.
"""

import logging
import os
import sys
import warnings

from transformers.utils import logging as transformers_logging

from ds_stochdpo.errors import StochDPOError
from ds_stochdpo.train import dry_run, parse_settings, run_training

EXIT_MISTAKE = 2
"""Exit code for wrong settings, data or model, and for a loss that is not finite."""
EXIT_INTERRUPTED = 130


def main() -> int:
    """Run the command line; returns the exit code."""
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
    # DeepSpeed 0.19.8 calls collectives by names that torch 2.13 renames; nothing a user could change.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    if rank != 0 or not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    try:
        config = parse_settings(sys.argv[1:])
        if config.dry_run:
            plan = dry_run(config)
            if rank == 0:
                print(plan)
            return 0
        run_training(config)
    except StochDPOError as error:
        print(f"error [rank {rank}]: {error}", file=sys.stderr, flush=True)
        return EXIT_MISTAKE
    except KeyboardInterrupt:
        print(f"interrupted [rank {rank}]: nothing was exported", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
