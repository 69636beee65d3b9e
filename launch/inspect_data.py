"""Look at preference pairs as a model would see them, before training on them.

python launch/inspect_data.py --dataset_name pairs.jsonl --model_name_or_path M [--rows 5] [--whole] [--split test]

Any setting of launch/train.py is taken too, also from --config FILE.yaml. Of the model only config and tokenizer are
read. Ends with 2 where a training run would be refused these rows.
"""

import argparse
import logging
import os
import shutil
import sys
from contextlib import closing

# Nothing here runs on a device, and DeepSpeed reports its search for one.
os.environ.setdefault("DS_ACCELERATOR", "cpu")

from ds_stochdpo.data.dataset import read_outcomes
from ds_stochdpo.data.rows import find_source
from ds_stochdpo.data.survey import MOST_CHARACTERS, survey
from ds_stochdpo.data.truncate import resolve_limits
from ds_stochdpo.engine import load_model_config, load_tokenizer
from ds_stochdpo.errors import StochDPOError
from ds_stochdpo.train import parse_settings

EXIT_MISTAKE = 2


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="launch/inspect_data.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=3, help="rows to show [3]")
    parser.add_argument("--whole", action="store_true", help=f"show texts beyond {MOST_CHARACTERS} characters whole")
    parser.add_argument("--split", choices=("train", "test"), default="train", help="split to look at [train]")
    own, settings = parser.parse_known_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        config = parse_settings(settings)
        tokenizer = load_tokenizer(config.model_name_or_path)
        context = getattr(load_model_config(config.model_name_or_path), "max_position_embeddings", None)
        source = find_source(config, own.split)
        limits = resolve_limits(config, context, tokenizer.bos_token_id)
        with closing(read_outcomes(config, tokenizer, source, limits)) as outcomes:
            found = survey(outcomes, data_errors=config.data_errors, num_rows=own.rows)
        is_terminal, most = sys.stdout.isatty(), None if own.whole else MOST_CHARACTERS
        width = shutil.get_terminal_size().columns if is_terminal else None
        print(f"{', '.join(source.parts)}, with the tokenizer of {config.model_name_or_path}", end="\n\n")
        print(found.text(tokenizer, limits, colour=is_terminal, most_characters=most, width=width), flush=True)
        if found.stops:
            raise StochDPOError(found.stops[0])
        found.account.check_used(source)
    except StochDPOError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_MISTAKE
    return 0


if __name__ == "__main__":
    sys.exit(main())
