"""Step time and peak memory of stock, exact and pruned DPO on the same pairs, in one run.

python launch/stopwatch.py [--config launch/recipes/quickstart.yaml] [--pairs 4] [--rounds 3]

Each variant lives in a process of its own, so that its peak memory is its own; the rounds take turns (A B C A B C), so
that a busy machine slows all of them alike. A step here is forward and backward of one batch; the optimizer step and
the reference, the same for all, are left out.
"""

import argparse
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.data import PreferencePair, load_pairs
from ds_stochdpo.engine import load_tokenizer
from ds_stochdpo.engine.step import micro_step
from ds_stochdpo.model import ScoringOptions, TwoLaneModel, choose_backend, family_of
from ds_stochdpo.packing import pack_lanes
from ds_stochdpo.pruning import draw_pairs, full_draw
from ds_stochdpo.train import parse_settings

VARIANTS = {
    "stock": "stock DPO: padded, concatenated, full logits",
    "exact": "exact: packed, prompt shared, chunked head",
    "pruned": "pruned as in the recipe",
}
STEP_SEED = 0


def stock_loss(lm: torch.nn.Module, pairs: list[PreferencePair], beta: float, device: torch.device) -> torch.Tensor:
    """Mean DPO loss of one padded batch, chosen rows above rejected rows, with a zero reference."""
    rows = [torch.from_numpy(ids) for ids in _full_rows(pairs)]
    batch = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
    lengths = torch.tensor([len(r) for r in rows], device=device)
    starts = torch.tensor([len(p.prompt_ids) for p in pairs] * 2, device=device)
    place = torch.arange(batch.shape[1], device=device)
    attends = place < lengths[:, None]
    is_response = (attends & (place >= starts[:, None]))[:, 1:]
    logits = lm(input_ids=batch, attention_mask=attends.long(), use_cache=False).logits[:, :-1].float()
    logps = logits.log_softmax(-1).gather(-1, batch[:, 1:, None]).squeeze(-1)
    chosen, rejected = (logps * is_response).sum(-1).chunk(2)
    return -F.logsigmoid(beta * (chosen - rejected)).mean()


def _full_rows(pairs: list[PreferencePair]) -> list:
    import numpy as np

    return [np.concatenate([p.prompt_ids, p.chosen_ids]) for p in pairs] + [
        np.concatenate([p.prompt_ids, p.rejected_ids]) for p in pairs
    ]


def make_step(
    variant: str, config: StochDPOConfig, pairs: list[PreferencePair], device: torch.device
) -> Callable[[int], None]:
    """One forward and backward of the variant; takes the round, which decides the draws."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    lm = AutoModelForCausalLM.from_pretrained(config.model_name_or_path, dtype=dtype)
    lm = lm.to(device).eval()
    if variant == "stock":
        return lambda turn: stock_loss(lm, pairs, config.beta, device).backward()
    caps_attention = family_of(lm).caps_attention(lm.config)
    _, backend = choose_backend(config.attn_implementation, device, dtype, caps_attention=caps_attention)
    model = TwoLaneModel(lm, backend, ScoringOptions(config.score_chunk_rows, config.score_recompute))

    def step(turn: int) -> None:
        if variant == "exact":
            draws = [full_draw(len(p.chosen_ids), len(p.rejected_ids)) for p in pairs]
        else:
            draws = draw_pairs(
                config.pruning,
                seed=STEP_SEED,
                epoch=turn,
                step=turn,
                pair_ids=[p.pair_id for p in pairs],
                chosen_lengths=[len(p.chosen_ids) for p in pairs],
                rejected_lengths=[len(p.rejected_ids) for p in pairs],
            )
        layout = pack_lanes(pairs, draws).to(device)
        micro_step(layout, draws, *model(layout), config, num_pairs_global=len(pairs)).surrogate.backward()

    return step


def work(variant: str, config: StochDPOConfig, num_pairs: int, pipe) -> None:
    """Body of a variant's process: load, say so, then time one step for every round asked for."""
    transformers_logging.disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pairs = load_pairs(config, load_tokenizer(config.model_name_or_path), progress=False).pairs[:num_pairs]
    step = make_step(variant, config, pairs, device)
    # The first step allocates the gradients, which belong to every variant, and warms up.
    step(0)
    base = _memory_mib(device, restart=True)
    pipe.send(len(pairs))
    while (turn := pipe.recv()) is not None:
        started = time.perf_counter()
        step(turn)
        if device.type == "cuda":
            torch.cuda.synchronize()
        pipe.send((time.perf_counter() - started, _memory_mib(device) - base))


def _memory_mib(device: torch.device, *, restart: bool = False) -> float:
    """Peak memory so far; with `restart` the memory in use now, from which peaks count again."""
    if device.type == "cuda":
        if restart:
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated() / 2**20
        return torch.cuda.max_memory_allocated() / 2**20
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    if restart:
        # 5 resets the peak resident set size of the process (proc(5)).
        Path("/proc/self/clear_refs").write_text("5")
    field = "VmRSS:" if restart else "VmHWM:"
    line = next(row for row in status.read_text().splitlines() if row.startswith(field))
    return int(line.split()[1]) / 2**10


def measure(config: StochDPOConfig, num_pairs: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(seconds, peak MiB beyond weights and gradients) of every round of every variant."""
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    try:
        with tqdm(total=len(VARIANTS) * (rounds + 1), desc="stopwatch", unit="step", mininterval=5) as bar:
            for variant in VARIANTS:
                # One after the other: loading is the largest part of the memory of a small machine.
                pipes[variant], theirs = spawn.Pipe()
                processes.append(spawn.Process(target=work, args=(variant, config, num_pairs, theirs), daemon=True))
                processes[-1].start()
                theirs.close()
                pipes[variant].recv()
                bar.update()
            times: dict[str, list[tuple[float, float]]] = {variant: [] for variant in VARIANTS}
            for turn in range(1, rounds + 1):
                for variant, pipe in pipes.items():
                    pipe.send(turn)
                    times[variant].append(pipe.recv())
                    bar.update()
        for pipe in pipes.values():
            pipe.send(None)
        return times
    except EOFError:
        sys.exit("error: a variant's process ended early; its message is above.")
    finally:
        for process in processes:
            process.join(timeout=30)


def print_table(times: dict[str, list[tuple[float, float]]], config: StochDPOConfig, num_pairs: int) -> None:
    """Medians, spread and ratios to stock DPO, round by round."""
    plan = config.pruning
    print(
        f"\nforward and backward of {num_pairs} pairs, {torch.get_num_threads()} thread(s), "
        f"torch {torch.__version__}; pruned: position_keep {plan.position_keep:g}, prefix_keep {plan.prefix_keep:g}, "
        f"branch {plan.branch}"
    )
    print(f"{'':48s}{'step, s':>9s}{'range':>15s}{'times faster':>14s}{'peak, MiB':>11s}{'of stock':>10s}")
    stock = times["stock"]
    for variant, title in VARIANTS.items():
        rounds = times[variant]
        seconds = [s for s, _ in rounds]
        faster = statistics.median(a / b for (a, _), (b, _) in zip(stock, rounds, strict=True))
        peak, stock_peak = (max(m for _, m in r) for r in (rounds, stock))
        print(
            f"{title:48s}{statistics.median(seconds):9.2f}{f'{min(seconds):.2f}-{max(seconds):.2f}':>15s}"
            f"{faster:13.2f}x{peak:11.0f}{peak / stock_peak:9.2f}x"
        )
    print("Peak: beyond weights and gradients. Pruning costs noise in the gradient: ds_stochdpo/pruning/METHOD.md.")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config", default="launch/recipes/quickstart.yaml", help="recipe whose model, pairs and pruning are used"
    )
    parser.add_argument("--pairs", type=int, default=4, help="pairs of one step")
    parser.add_argument("--rounds", type=int, default=3, help="timed steps of each variant")
    arguments = parser.parse_args()
    config = parse_settings(["--config", arguments.config])
    times = measure(config, arguments.pairs, arguments.rounds)
    print_table(times, config, arguments.pairs)


if __name__ == "__main__":
    main()
