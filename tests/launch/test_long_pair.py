"""The command that measures one long pair."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import jobs

ROOT = Path(__file__).parents[2]
PROMPT, RESPONSE, LAYERS, HIDDEN, FFN, VOCAB, TILE, ROWS = 1024, 1024, 4, 128, 512, 4096, 128, 64


@pytest.mark.parametrize(("branch", "dtype", "width"), [("both", "float32", 4), ("single", "bfloat16", 2)])
def test_one_long_pair_beside_its_arithmetic_and_stock(tmp_path, branch, dtype, width):
    sizes = {"prompt_tokens": PROMPT, "response_tokens": RESPONSE, "layers": LAYERS, "hidden": HIDDEN, "ffn": FFN,
             "heads": 4, "kv_heads": 2, "vocab": VOCAB, "mlp_tile_tokens": TILE, "score_chunk_rows": ROWS,
             "threads": 1}  # fmt: skip
    flags = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    done = subprocess.run(
        [sys.executable, "launch/long_pair.py", *flags, "--branch", branch, "--dtype", dtype, "--output",
         str(tmp_path / "long.json")],
        cwd=ROOT, env=jobs.environment(), capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "FutureWarning" not in done.stderr
    record = json.loads((tmp_path / "long.json").read_text())
    live = PROMPT + RESPONSE * (2 if branch == "both" else 1)
    # One input a layer, and six times [tile, ffn] while a tile is run and differentiated.
    assert record["parts_bytes"]["saved layer inputs"] == LAYERS * live * HIDDEN * width
    assert record["parts_bytes"]["one feed-forward tile"] == 6 * TILE * FFN * width
    # Both rows with whole logits: they alone, in fp32, outweigh all that we hold.
    assert record["stock_measured"]["bytes"] > 2 * (PROMPT + RESPONSE) * VOCAB * 4
    assert 0 < record["measured"]["bytes"] < record["stock_measured"]["bytes"] / 3
