"""What `launch/inspect_data.py` says of a set: rows as the model sees them, lengths, counts, and what would stop."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from transformers import LlamaConfig

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.data import load_pairs
from tests.data.texts import assistant, chatml, user
from tests.tiny import tiny_tokenizer, write_rows

SCRIPT = Path(__file__).parents[2] / "launch" / "inspect_data.py"

ROWS = [
    {"prompt": "Name a colour.", "chosen": "It is blue.", "rejected": "It is 7.", "id": 3},
    {"prompt": "p\x1b[31m", "chosen": None, "rejected": "x"},
    {"prompt": [user("Hi")], "chosen": [assistant("one\n\ntwo")], "rejected": [assistant("no")]},
    {"prompt": "1 2 3 4 5 6 7 8 9 10", "chosen": "Green." * 40, "rejected": "Blue."},
]


def num_tokens(text):
    return len(tiny_tokenizer()(text)["input_ids"])


@pytest.fixture
def inspect(tmp_path, monkeypatch, capsys):
    """Run the script on rows with a model of which only config and tokenizer exist; (exit code, stdout, stderr)."""
    model = tmp_path / "model"
    tiny_tokenizer().save_pretrained(model)
    LlamaConfig(vocab_size=347, max_position_embeddings=64).save_pretrained(model)
    spec = importlib.util.spec_from_file_location("inspect_data", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    def run(rows, *flags):
        write_rows(tmp_path / "rows.jsonl", rows)
        monkeypatch.chdir(tmp_path)
        command = ["inspect_data.py", "--dataset_name", "rows.jsonl", "--model_name_or_path", "model", *flags]
        monkeypatch.setattr("sys.argv", command)
        code = script.main()
        return (code, *capsys.readouterr())

    return run


def test_rows_are_shown_as_the_model_sees_them(inspect):
    code, out, err = inspect(ROWS, "--rows", "3")
    assert (code, err) == (0, "")
    shown = out.split("4 rows read")[0]
    prompt, chosen, rejected = map(
        num_tokens, (chatml(user("Hi"), header=True), "one\n\ntwo<|im_end|>\n", "no<|im_end|>\n")
    )
    assert shown == (
        "rows.jsonl, with the tokenizer of model\n\n"
        "|  not scored     >  scored     { }  both responses begin with this\n\n"
        "row 1: rows.jsonl:1\n"
        "  prompt: 5 tokens, not scored\n"
        "    | Name a colour.\n"
        "  chosen: 9 tokens, scored, 3 at the start shared\n"
        "    > {It is} blue.<|im_end|>\n"
        "  rejected: 6 tokens, scored, 3 at the start shared\n"
        "    > {It is} 7.<|im_end|>\n\n"
        "row 2: rows.jsonl:2\n"
        "  makes no pair: not text (chosen is null)\n\n"
        "row 3: rows.jsonl:3\n"
        f"  prompt: {prompt} tokens, not scored\n"
        "    | <|im_start|>user\n"
        "    | Hi<|im_end|>\n"
        "    | <|im_start|>assistant\\n\n"
        f"  chosen: {chosen} tokens, scored\n"
        "    > one\n"
        "    > \n"
        "    > two<|im_end|>\\n\n"
        f"  rejected: {rejected} tokens, scored\n"
        "    > no<|im_end|>\\n\n\n"
    )


def test_cuts_are_named_and_long_texts_shortened_but_not_with_whole(inspect):
    rows = [{"prompt": "A", "chosen": "Boil the egg. " * 300, "rejected": "No."}]
    _, short, _ = inspect(rows, "--rows", "1", "--max_length", "40")
    full = num_tokens(rows[0]["chosen"]) + 1
    assert f"  chosen: 39 tokens, scored (cut from {full:,}: chosen (max_length))\n" in short
    assert "characters ...]" not in short
    config = json.loads(Path("model/config.json").read_text())
    Path("model/config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    _, short, _ = inspect(rows, "--rows", "1")
    _, whole, _ = inspect(rows, "--rows", "1", "--whole")
    text = "Boil the egg. " * 300 + "<|im_end|>"
    assert f"    > {text[:600]}\n    > [... {len(text) - 1200:,} characters ...]\n    > {text[-600:]}\n" in short
    assert f"    > {text}\n" in whole


def test_lengths_and_counts_are_those_of_the_set(inspect):
    code, out, _ = inspect(ROWS, "--rows", "0")
    pairs = load_pairs(StochDPOConfig(dataset_name="rows.jsonl"), tiny_tokenizer()).pairs
    cut = load_pairs(StochDPOConfig(dataset_name="rows.jsonl"), tiny_tokenizer(), context_length=64).pairs
    lengths = {
        "prompt": [len(p.prompt_ids) for p in pairs],
        "chosen": [len(p.chosen_ids) for p in pairs],
        "rejected": [len(p.rejected_ids) for p in pairs],
        "prompt + longer response": [len(p.prompt_ids) + max(len(p.chosen_ids), len(p.rejected_ids)) for p in pairs],
    }
    table = {line[2:28].strip(): line[28:].split() for line in out.splitlines() if line.startswith("  ")}
    for name, values in lengths.items():
        want = [min(values), np.median(values), np.percentile(values, 95), max(values), sum(values)]
        assert table[name] == [f"{value:,.0f}" for value in want], name
    scored = sum(len(p.chosen_ids) + len(p.rejected_ids) for p in cut)
    tokens = scored + sum(len(p.prompt_ids) for p in cut)
    shared = sum(p.shared_start for p in cut)
    assert shared == 3
    assert f"one pass runs {tokens:,} tokens, each prompt once; {scored:,} are scored, {shared} of them in" in out
    num_cut = sum(len(b.chosen_ids) < len(a.chosen_ids) for a, b in zip(pairs, cut, strict=True))
    assert num_cut == 1
    lost = 1 - tokens / sum(sum(lengths[name]) for name in ("prompt", "chosen", "rejected"))
    assert f"in force: max_length 64; cuts 1 of 3 pairs (33.3%), {lost:.1%} of all tokens" in out
    longest = lengths["prompt + longer response"]
    assert f"  64: {sum(n > 64 for n in longest) / 3:.1%}" in out
    assert f"the longest pair needs {max(longest)}" in out
    assert "4 rows read, 3 pairs\n  dropped: 1 not text (chosen is null)\n    rows.jsonl:2\n" in out
    assert "  cut: 1 chosen (max_length)\n    rows.jsonl:4\n" in out
    assert "  columns not used: id\n" in out
    assert code == 0


def test_what_would_end_a_run_is_counted_to_the_end_and_is_an_error(inspect):
    rows = [ROWS[0], [1], ROWS[2], [2], {"prompt": "p", "chosen": 1, "rejected": 2}]
    code, out, err = inspect(rows)
    assert code == 2
    assert "5 rows read, 2 pairs" in out
    assert "  ends a training run: 2 not an object" in out
    assert "    rows.jsonl:2, 4\n" in out
    assert "  dropped: 1 not text" in out
    assert err.startswith("error: rows.jsonl:2: ")
    code, out, err = inspect(rows, "--data_errors", "skip")
    assert (code, err) == (0, "")
    assert "  dropped: 2 not an object" in out


@pytest.mark.parametrize(
    ("rows", "flags", "message"),
    [
        ([], (), "error: rows.jsonl: no rows"),
        (ROWS[1:2], (), "error: rows.jsonl: 0 of 1 rows usable. 1 not text"),
        (ROWS, ("--max_lenght", "5"), "error: --max_lenght is no setting; did you mean max_length?"),
        (ROWS, ("--max_length", "65"), "error: max_length is 65, but the model has 64 positions"),
    ],
)
def test_mistakes_are_sentences(inspect, rows, flags, message):
    code, _, err = inspect(rows, *flags)
    assert code == 2
    assert err.startswith(message)


def test_colour_and_width_are_for_terminals(inspect, monkeypatch):
    rows = [*ROWS, {"prompt": "Esc \x1b[31m", "chosen": "a", "rejected": "b"}]
    _, plain, _ = inspect(rows, "--rows", "5")
    # What a row holds cannot speak to the terminal itself.
    assert "    | Esc \\x1b[31m\n" in plain
    assert "\x1b" not in plain
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    _, painted, _ = inspect(ROWS, "--rows", "4")
    assert "    > \x1b[32m{It is} blue.<|im_end|>\x1b[0m\n" in painted
    texts = [line for line in painted.splitlines() if line.startswith("    > ")]
    assert max(len(line.replace("\x1b[32m", "").replace("\x1b[31m", "").replace("\x1b[0m", "")) for line in texts) == 40
