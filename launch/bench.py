"""Step time and peak memory of every way to compute a DPO step, side by side in one run.

python launch/bench.py [--workloads FILE synthetic:256x256 ...] [--trl PYTHON] [--key value ...]

A step is draws, packing, forward, backward, metrics and AdamW of one batch. In each round every variant takes its turn
(A B C A B C); ratios are taken round by round, so that a busy machine slows both sides alike. Peak memory is that of a
process of its own for each variant, beyond weights, gradients and optimizer state. Any setting of launch/train.py is a
flag here too: the model, the pairs, the pruning. With --layers the model keeps so many layers and gets random weights,
which changes no time; what is compared computes the same numbers.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarking.memory import MemoryFigures, measure_memory
from benchmarking.peer import TITLES, TrlPeer
from benchmarking.picture import write_page
from benchmarking.record import expected_work, run_facts, table, workload_record
from benchmarking.sections import SECTIONS
from benchmarking.timing import time_variants, timed
from benchmarking.variants import BASES, SUFFIXES, Bench, BenchVariant, variant_of
from benchmarking.workload import Workload, load_workload, model_shape, raw_rows, save_model
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.errors import StochDPOError
from ds_stochdpo.pruning import ModelShape
from ds_stochdpo.train import parse_settings

DEFAULT_VARIANTS = (*BASES, "stock+ckpt", "packed+ckpt", "packed_single+ckpt", "exact+ckpt", "all+ckpt",
                    "stock+online", "exact+online", "all+online", "single_prefix+budget")  # fmt: skip


def measure(own: argparse.Namespace, config: StochDPOConfig, workload: Workload) -> dict[str, Any]:
    """The record of one batch."""
    shape = model_shape(config, own.layers)
    variants = {name: variant_of(name, config, len(workload.pairs)) for name in own.variants}
    variants = {name: fit_variant(variant, workload, shape, config) for name, variant in variants.items()}

    def turns(name: str, number: int) -> list[int]:
        count = own.draws if name in variants and variants[name].is_sampled else 1
        return [number * own.draws + k for k in range(count)]

    with tempfile.TemporaryDirectory() as folder:
        peers = start_peers(own, config, workload, Path(folder))
        try:
            rounds = time_variants(timed_steps(config, own.layers, workload, variants, peers), own.rounds, turns)
        finally:
            for peer in peers.values():
                peer.close()
    memory: dict[str, MemoryFigures] = {}
    if own.memory:
        for name, variant in tqdm(variants.items(), desc="peak memory", unit="variant", mininterval=5):
            memory[name] = measure_memory(variant, workload, config, own.layers, turns(name, 1))
    record = workload_record(workload, variants, rounds, memory, shape, {n: p.title for n, p in peers.items()})
    return record | {"peers": {name: peer.versions for name, peer in peers.items()}}


def timed_steps(
    config: StochDPOConfig,
    num_layers: int,
    workload: Workload,
    variants: dict[str, BenchVariant],
    peers: dict[str, TrlPeer],
) -> dict[str, Callable[[int], float]]:
    """What takes one step of each variant and returns its seconds."""
    bench = Bench(config, num_layers, {variant.form for variant in variants.values()})

    def take(variant: BenchVariant, turn: int) -> float:
        return timed(partial(bench.step, variant, workload.pairs[: variant.num_pairs], turn), bench.device)

    own = {name: partial(take, variant) for name, variant in variants.items()}
    return {**own, **{name: lambda turn, peer=peer: peer.step() for name, peer in peers.items()}}


def fit_variant(variant: BenchVariant, workload: Workload, shape: ModelShape, config: StochDPOConfig) -> BenchVariant:
    """Settle what depends on the batch: the pairs of `smaller`, the token budget of `+budget`."""
    if variant.name.startswith("smaller"):
        budget = expected_work(variant_of("all", config, len(workload.pairs)), workload, shape).total
        sizes = [dataclasses.replace(variant, num_pairs=n) for n in range(1, len(workload.pairs) + 1)]
        variant = min(sizes, key=lambda v: abs(expected_work(v, workload, shape).total - budget))
    if variant.name.endswith("+budget"):
        # What a step runs on average: a step that drew long prefixes is cut in two.
        variant = dataclasses.replace(
            variant, max_tokens=round(expected_work(variant, workload, shape).tokens_executed)
        )
    return variant


def start_peers(
    own: argparse.Namespace, config: StochDPOConfig, workload: Workload, folder: Path
) -> dict[str, TrlPeer]:
    """TRL, if its interpreter is given and the batch has text; the model it loads is put into `folder`."""
    if not own.trl or not workload.path:
        return {}
    save_model(config, own.layers, folder)
    facts = {
        "model": str(folder),
        "rows": raw_rows(workload),
        "steps": own.rounds + 2,
        "beta": config.beta,
        "max_length": config.max_length or 8192,
        "threads": torch.get_num_threads(),
    }
    return {name: TrlPeer(own.trl, name, facts) for name in TITLES}


def parse(arguments: list[str]) -> tuple[argparse.Namespace, StochDPOConfig]:
    """Own flags, and the settings of a run for the rest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", help="files of pairs, or synthetic:PROMPTxRESPONSE [dataset_name]")
    parser.add_argument(
        "--variants",
        nargs="+",
        default=list(DEFAULT_VARIANTS),
        help=f"any of {', '.join(BASES)}, with the suffixes {', '.join(SUFFIXES)} [a choice of all]",
    )
    parser.add_argument("--sections", nargs="*", default=[], choices=list(SECTIONS), help="further measurements")
    parser.add_argument("--batch_size", type=int, default=8, help="pairs of a step [8]")
    parser.add_argument(
        "--layers", type=int, default=4, help="layers kept, with random weights; 0: the whole model [4]"
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds [5]")
    parser.add_argument("--draws", type=int, default=4, help="steps of a sampled variant in each round [4]")
    parser.add_argument("--no_memory", dest="memory", action="store_false", help="leave peak memory out")
    parser.add_argument("--trl", help="Python of an environment with TRL, measured in turn with the others")
    own, rest = parser.parse_known_args(arguments)
    if "--config" not in rest:
        rest = ["--config", str(Path(__file__).with_name("benchmarking") / "default.yaml"), *rest]
    config = parse_settings(rest)
    own.output_dir = Path(config.output_dir)
    own.workloads = own.workloads or [config.dataset_name]
    return own, config


def main() -> int:
    """Run the command line; returns the exit code."""
    try:
        own, config = parse(sys.argv[1:])
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        workloads = [load_workload(name, config, own.batch_size) for name in own.workloads]
        for name in own.variants:
            variant_of(name, config, own.batch_size)
        own.output_dir.mkdir(parents=True, exist_ok=True)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        record: dict[str, Any] = run_facts(config, own.layers, own.rounds, device)
        record["workloads"], record["sections"], section_lines = [], {}, []
        for workload in workloads:
            record["workloads"].append(measure(own, config, workload))
            print("\n".join(("", *table(record["workloads"][-1]))), flush=True)
        for name in own.sections:
            record["sections"][name] = SECTIONS[name].measure(config, own.layers, own.rounds)
            section_lines += SECTIONS[name].lines(record["sections"][name])
        print("\n".join(("", *section_lines)))
    except StochDPOError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    (own.output_dir / "bench.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    write_page(record, section_lines, own.output_dir)
    print("\nPeak: beyond weights, gradients and optimizer state.")
    print("Pruning costs noise in the gradient, which no figure here shows: ds_stochdpo/pruning/METHOD.md.")
    print(f"record, picture and page: {own.output_dir}/bench.json, bench.png, bench.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
