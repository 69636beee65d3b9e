"""Peak memory of one training step on one long preference pair, beside the arithmetic and beside stock DPO.

python launch/long_pair.py [--prompt_tokens 16384] [--response_tokens 16384] [--branch single] [--dtype float32]
                           [--layers 8] [--hidden 512] ... [--output long_pair.json]

A model with random weights trains one optimizer step: layers recomputed, feed-forward blocks in tiles, head in tiles.
The peak counts beyond weights, gradients and optimizer state. On a CPU it is that of the resident memory of a process
of its own, on a GPU that of torch's allocator. Stock DPO (both rows padded and concatenated, layers recomputed, logits
whole) is run too where its estimate fits into free memory, else the estimate is printed.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import ds_stochdpo
from ds_stochdpo.data import PreferencePair
from ds_stochdpo.engine import process_group
from ds_stochdpo.model import family_of_config
from ds_stochdpo.model.rehearsal import rehearse_stock
from ds_stochdpo.pruning import ModelShape, full_draw
from ds_stochdpo.pruning.memory import recompute_peak

MIB = 2**20
WARM_TOKENS = 32
BF16_JSON = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 1_000_000, "overlap_comm": False}}
"""bf16 needs ZeRO 1 to 3. On one rank ZeRO-3 would hold gathered copies of weights beside the weights themselves."""
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20)}
"""glibc keeps freed blocks of up to 32 MiB for itself, which would count as used; these limits make it return them."""


def model_config(settings: argparse.Namespace) -> LlamaConfig:
    """The model's config."""
    return LlamaConfig(
        hidden_size=settings.hidden,
        intermediate_size=settings.ffn,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        vocab_size=settings.vocab,
        max_position_embeddings=settings.prompt_tokens + settings.response_tokens,
        tie_word_embeddings=settings.tie,
    )


def long_pair(prompt: int, response: int, vocab: int) -> PreferencePair:
    """A pair of random tokens with a zero reference; the responses differ from their first token on."""
    rng = np.random.default_rng(0)
    chosen, rejected = rng.integers(0, vocab, (2, response))
    rejected[0] = (chosen[0] + 1) % vocab
    zeros = np.zeros(response, np.float32)
    return PreferencePair(0, rng.integers(0, vocab, prompt), chosen, rejected, "random", zeros, zeros)


def resident(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    rows = Path("/proc/self/status").read_text().splitlines()
    return int(next(row for row in rows if row.startswith(field)).split()[1]) * 2**10


class PeakMeter:
    """Most memory in use since `restart`, beyond what was in use then."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.base = 0

    def restart(self) -> None:
        """Count from here."""
        if self.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.base = torch.cuda.memory_allocated()
        else:
            # 5 resets the peak resident set size of the process (proc(5)).
            Path("/proc/self/clear_refs").write_text("5")
            self.base = resident("VmRSS:")

    def peak(self) -> int:
        """Bytes; waits for the device."""
        if self.on_gpu:
            torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() if self.on_gpu else resident("VmHWM:")) - self.base


def train_long(settings: argparse.Namespace, device: torch.device, lm: LlamaForCausalLM) -> dict[str, float]:
    """One optimizer step through the engine; a short one before it makes the optimizer's state."""
    config = ds_stochdpo.StochDPOConfig(
        branch=settings.branch,
        per_device_train_batch_size=1,
        gradient_checkpointing=True,
        activation_offload=device.type == "cuda" and settings.offload,
        mlp_tile_tokens=settings.mlp_tile_tokens,
        score_chunk_rows=settings.score_chunk_rows,
        bf16=settings.dtype == "bfloat16",
        learning_rate=1e-6,
    )
    ds = json.loads(Path(settings.deepspeed).read_text()) if settings.deepspeed else None
    if ds is None and config.bf16:
        ds = BF16_JSON
    engine = ds_stochdpo.initialize(model=lm, config=config, deepspeed=ds)

    def step(prompt: int, response: int) -> None:
        draw = full_draw(response, response)
        if settings.branch == "single":
            draw = replace(draw, kept="chosen", kept_prob=0.5)
        engine.train_step([long_pair(prompt, response, settings.vocab)], [draw])

    meter = PeakMeter(device)
    update = engine.deepspeed.step
    peaks: list[int] = []

    def update_after_reading(*args, **kwargs):
        # What the optimizer needs for a moment is there when activations are gone.
        peaks.append(meter.peak())
        return update(*args, **kwargs)

    engine.deepspeed.step = update_after_reading
    measured = measure(step, settings, meter, lm)
    # Early in the backward pass most gradients are not there yet: the second figure takes off none of them.
    return {
        **measured,
        "bytes": peaks[-1] - measured["gradients"],
        "bytes_with_gradients": peaks[-1],
        "bytes_with_update": measured["bytes"],
    }


def train_stock(settings: argparse.Namespace, device: torch.device, lm: LlamaForCausalLM) -> dict[str, float]:
    """Forward and backward as stock DPO does them; the optimizer's state, the same for all, is left out."""
    lm.activation_checkpointing_enable()
    lm.train()

    def step(prompt: int, response: int) -> None:
        pair = long_pair(prompt, response, settings.vocab)
        rows = [np.concatenate([pair.prompt_ids, ids]) for ids in (pair.chosen_ids, pair.rejected_ids)]
        batch = torch.from_numpy(np.stack(rows)).to(device)
        logps = lm(input_ids=batch, use_cache=False).logits[:, :-1].float().log_softmax(-1)
        scores = logps.gather(-1, batch[:, 1:, None]).squeeze(-1)[:, prompt - 1 :].sum(-1)
        (-F.logsigmoid(0.1 * (scores[0] - scores[1]))).backward()
        lm.zero_grad()

    return measure(step, settings, PeakMeter(device), lm)


def measure(step, settings: argparse.Namespace, meter: PeakMeter, lm: LlamaForCausalLM) -> dict[str, float]:
    """Seconds and bytes of the long step beyond the state."""
    step(WARM_TOKENS, WARM_TOKENS)
    meter.restart()
    # Gradients that are given back between steps are part of the state all the same.
    released = sum(p.numel() * p.element_size() for p in lm.parameters() if p.grad is None and p.numel())
    started = time.perf_counter()
    step(settings.prompt_tokens, settings.response_tokens)
    peak = meter.peak()
    return {"seconds": time.perf_counter() - started, "bytes": peak - released, "gradients": released}


def work(variant: str, settings: argparse.Namespace, pipe) -> None:
    """Body of a variant's process."""
    torch.manual_seed(0)
    torch.set_num_threads(settings.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with process_group():
        lm = LlamaForCausalLM(model_config(settings)).to(device, getattr(torch, settings.dtype))
        pipe.send((train_long if variant == "long" else train_stock)(settings, device, lm))


def run(variant: str, settings: argparse.Namespace) -> dict[str, float]:
    """Measure a variant in a fresh process."""
    os.environ.update(MALLOC)
    ours, theirs = multiprocessing.get_context("spawn").Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=work, args=(variant, settings, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        sys.exit(f"error: the process that measured {variant} ended early; its message is above.")
    finally:
        process.join()


def predict(settings: argparse.Namespace) -> tuple[dict[str, int], int]:
    """Parts of our peak, and stock DPO's peak, in bytes."""
    config = model_config(settings)
    shape: ModelShape = family_of_config(config).shape(config)
    width = 2 if settings.dtype == "bfloat16" else 4
    row = settings.prompt_tokens + settings.response_tokens
    parts = recompute_peak(
        shape,
        live_tokens=row + (settings.response_tokens if settings.branch == "both" else 0),
        weight_bytes=width,
        mlp_tile_tokens=settings.mlp_tile_tokens,
        chunk_rows=settings.score_chunk_rows,
        offload=settings.offload and torch.cuda.is_available(),
    )
    with torch.device("meta"):
        lm = LlamaForCausalLM(config).to(getattr(torch, settings.dtype))
    kernel = "flash" if torch.cuda.is_available() else "sdpa"
    return parts, rehearse_stock(lm, rows=2, length=row, checkpointing=True, kernel=kernel).peak


def free_bytes() -> int:
    """Memory that a new process may take."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    rows = Path("/proc/meminfo").read_text().splitlines()
    return int(next(r for r in rows if r.startswith("MemAvailable:")).split()[1]) * 2**10


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {
        "prompt_tokens": 16384, "response_tokens": 16384, "layers": 8, "hidden": 512, "ffn": 2048, "heads": 8,
        "kv_heads": 2, "vocab": 49152, "mlp_tile_tokens": 1024, "score_chunk_rows": 256,
        "threads": torch.get_num_threads(),
    }  # fmt: skip
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="[%(default)s]")
    parser.add_argument("--branch", choices=["single", "both"], default="single")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--tie", action="store_true", help="share the embedding with the head")
    parser.add_argument("--offload", action="store_true", help="inputs of layers wait on the host (GPU)")
    parser.add_argument("--stock", choices=["auto", "never"], default="auto", help="measure stock DPO where it fits")
    parser.add_argument("--deepspeed", default=None, help="DeepSpeed JSON [none; bfloat16: ZeRO 2]")
    parser.add_argument("--output", type=Path, default=None, help="write a JSON record here")
    settings = parser.parse_args(argv)
    if settings.hidden % settings.heads or settings.heads % settings.kv_heads:
        parser.error("hidden must be a multiple of heads, and heads of kv_heads")
    return settings


def main() -> None:
    """Run the command line."""
    settings = parse()
    parts, stock_estimate = predict(settings)
    ours = run("long", settings)
    stock = run("stock", settings) if settings.stock == "auto" and stock_estimate < 0.8 * free_bytes() else None
    total = sum(parts.values())
    print(
        f"\n1 pair of {settings.prompt_tokens} + 2 x {settings.response_tokens} tokens, branch {settings.branch}, "
        f"{settings.layers} layers of width {settings.hidden}, {settings.dtype}"
    )
    print("MiB beyond weights, gradients and optimizer")
    for name, part in parts.items():
        print(f"  {name:50s}{part / MIB:10.0f}")
    print(f"  {'together':50s}{total / MIB:10.0f}")
    print(f"  {'measured':50s}{ours['bytes'] / MIB:10.0f}   {ours['bytes'] / total:.2f} of it, {ours['seconds']:.0f} s")
    print(f"  {'measured, gradients counted in':50s}{ours['bytes_with_gradients'] / MIB:10.0f}")
    how = "estimated" if stock is None else "measured"
    stock_bytes = stock_estimate if stock is None else stock["bytes"]
    print(f"  {'stock DPO, ' + how:50s}{stock_bytes / MIB:10.0f}   {stock_bytes / ours['bytes']:.1f} times as much")
    record = {
        "settings": {**vars(settings), "output": str(settings.output)},
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "parts_bytes": parts,
        "measured": ours,
        "ratio": ours["bytes"] / total,
        "stock_estimate_bytes": stock_estimate,
        "stock_measured": stock,
    }
    if settings.output:
        settings.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
