r"""Choose a plan before renting machines: work, memory, communication and scaling of several plans, side by side.

python launch/estimate.py --config launch/recipes/70b_multi_node.yaml [--nodes 1,2,4,8] [--key value ...]
python launch/estimate.py --model_name_or_path launch/recipes/shapes/llama-3.1-8b.json --bf16 true \
    --deepspeed ds_configs/zero3.json --dry_run_ranks 8 --gradient_checkpointing true \
    --prompt_tokens 512 --chosen_tokens 400 --rejected_tokens 300

Every setting of launch/train.py is a flag here too; dry_run_ranks says for how many ranks work and memory are computed.
No weights are loaded and nothing is downloaded: the model is a config.json. Its memory is that of a real step of the
same code, run on tensors without content.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.errors import ConfigError, StochDPOError
from ds_stochdpo.planning.estimate import OWN, Estimate, estimate, plans_for
from ds_stochdpo.planning.estimate_page import estimate_page
from ds_stochdpo.planning.outlook import look_ahead
from ds_stochdpo.pruning.traffic import Cluster
from ds_stochdpo.train import parse_settings

EXIT_MISTAKE = 2
LENGTHS = ("prompt_tokens", "chosen_tokens", "rejected_tokens")


def parser() -> argparse.ArgumentParser:
    """Flags beside the settings."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for name in LENGTHS:
        made.add_argument(f"--{name}", type=int, help="assume this length of every pair; give all three or none")
    made.add_argument(
        "--plans", help=f"comma-separated plans to show, of the names in the first column; also {OWN!r} [all]"
    )
    made.add_argument("--tflops", type=float, default=400.0, help="10^12 operations/s a GPU sustains [%(default)s]")
    made.add_argument("--gpus_per_node", type=int, default=8, help="[%(default)s]")
    made.add_argument(
        "--link_gbps", type=float, default=3600.0, help="10^9 bit/s from one GPU into its node, one way [%(default)s]"
    )
    made.add_argument(
        "--node_gbps", type=float, default=3200.0, help="10^9 bit/s out of one node, all its cards [%(default)s]"
    )
    made.add_argument("--nodes", default="1,2,4,8,16", help="numbers of nodes to scale to [%(default)s]")
    made.add_argument("--json", type=Path, metavar="FILE", help="also write everything there")
    return made


def run(arguments: Sequence[str]) -> Estimate:
    """The estimate that a command line asks for.

    Raises:
        StochDPOError: If flags, settings, model or pairs are refused.
    """
    flags, rest = parser().parse_known_args(arguments)
    lengths = [getattr(flags, name) for name in LENGTHS]
    given = [length for length in lengths if length is not None]
    if len(given) not in (0, 3) or any(length < 1 for length in given):
        raise ConfigError(f"{', '.join(LENGTHS)} are {lengths}; give all three, each at least 1, or none of them.")
    cluster = Cluster(flags.tflops, flags.gpus_per_node, flags.link_gbps, flags.node_gbps)
    for name, value in dataclasses.asdict(cluster).items():
        if value <= 0:
            raise ConfigError(f"{name} is {value}; it must be above 0.")
    nodes = _nodes(flags.nodes)
    outlook = look_ahead(_with_config_file(parse_settings(rest)), (given[0], given[1], given[2]) if given else None)
    names = [name.strip() for name in flags.plans.split(",")] if flags.plans else None
    plans = plans_for(outlook, names)
    with tqdm(total=len(plans), desc="plans", mininterval=5, leave=False) as bar:

        def told(name: str) -> None:
            bar.set_postfix_str(name)
            bar.update()

        result = estimate(outlook, plans, cluster, nodes=nodes, told=told)
    if flags.json:
        flags.json.write_text(json.dumps(result.record(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return result


def _nodes(text: str) -> list[int]:
    try:
        nodes = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        nodes = [0]
    if any(n < 1 for n in nodes):
        raise ConfigError(f"nodes is {text!r}; give whole numbers from 1, joined by commas.")
    return nodes


def _with_config_file(config: StochDPOConfig) -> StochDPOConfig:
    """A model named by its config.json is one that is not on disk."""
    if config.model_name_or_path.endswith(".json") and config.dry_run_model_config is None:
        return dataclasses.replace(config, dry_run_model_config=config.model_name_or_path)
    return config


def main() -> int:
    """Run the command line; returns the exit code."""
    transformers_logging.disable_progress_bar()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        print(estimate_page(run(sys.argv[1:])))
    except StochDPOError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_MISTAKE
    return 0


if __name__ == "__main__":
    sys.exit(main())
