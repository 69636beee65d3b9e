"""TRL's DPOTrainer as one more variant, in a Python environment of its own, step by step in turn with the others.

Entry: `TrlPeer`. Run by itself (`python peer.py FACTS.json`, in that environment) this file is the other side.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TITLES = {
    "trl": "TRL, precomputed reference, head on all rows (its default on CPU)",
    "trl_compact": "TRL, precomputed reference, head on response rows (as on a GPU)",
}
"""What a name means."""


class TrlPeer:
    """A trainer that waits in its own process and takes one optimizer step whenever it is told to.

    Attributes:
        title: For people.
        versions: TRL, transformers and torch of its environment.
    """

    def __init__(self, python: str, name: str, facts: dict[str, Any]) -> None:
        """Start it.

        Args:
            python: Interpreter of an environment with TRL.
            name: A key of `TITLES`.
            facts: model (folder), rows (prompt, chosen, rejected of each pair), steps, beta, max_length, threads.

        Raises:
            RuntimeError: If it cannot start; its own message is on stderr.
        """
        self.title = TITLES[name]
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name) / "facts.json"
        path.write_text(json.dumps({**facts, "compact": name == "trl_compact", "folder": self._folder.name}))
        environment = {
            **{k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_CACHE": f"{self._folder.name}/datasets",
            "OMP_NUM_THREADS": str(facts["threads"]),
            "TOKENIZERS_PARALLELISM": "false",
            "TQDM_DISABLE": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "PYTHONWARNINGS": "ignore",
        }
        self._process = subprocess.Popen(
            [python, __file__, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.versions = self._ask(None)["versions"]

    def step(self) -> float:
        """Take one optimizer step; seconds it took."""
        return float(self._ask("step")["seconds"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._folder.cleanup()

    def _ask(self, word: str | None) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if word:
            print(word, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError("the TRL process ended early; its message is above.")


def serve(facts: dict[str, Any]) -> None:
    """Train with TRL, one optimizer step for every line on stdin. Runs in TRL's environment."""
    import torch
    import transformers
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer, PrinterCallback

    answers = os.fdopen(os.dup(1), "w")
    # Whatever prints to stdout must not get between the answers.
    os.dup2(2, 1)
    torch.set_num_threads(facts["threads"])
    if facts["compact"]:
        # TRL gives the head only response rows where Triton runs, and every row elsewhere. This is its own switch; on
        # a CPU the fallback in plain PyTorch does the work.
        trl.trainer.utils._use_triton = lambda device: True
    versions = {package.__name__: package.__version__ for package in (trl, transformers, torch)}
    trainer = trl.DPOTrainer(
        model=facts["model"],
        args=_arguments(facts),
        train_dataset=Dataset.from_list(facts["rows"] * facts["steps"]),
        processing_class=AutoTokenizer.from_pretrained(facts["model"]),
        callbacks=[_turns(lambda **fields: print(json.dumps(fields), file=answers, flush=True), versions)],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def _arguments(facts: dict[str, Any]) -> Any:
    import torch
    import trl

    on_gpu = torch.cuda.is_available()
    num_pairs = len(facts["rows"])
    return trl.DPOConfig(
        output_dir=facts["folder"],
        use_cpu=not on_gpu,
        bf16=on_gpu,
        gradient_checkpointing=False,
        per_device_train_batch_size=num_pairs,
        max_steps=facts["steps"],
        train_sampling_strategy="sequential",
        learning_rate=0.0,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=0.0,
        optim="adamw_torch",
        beta=facts["beta"],
        loss_type=["sigmoid"],
        max_length=facts["max_length"],
        truncation_mode="keep_start",
        disable_dropout=True,
        precompute_ref_log_probs=True,
        precompute_ref_batch_size=num_pairs,
        model_init_kwargs={"dtype": "bfloat16" if on_gpu else "float32", "attn_implementation": "sdpa"},
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
        eval_strategy="no",
    )


def _turns(answer: Callable[..., None], versions: dict[str, str]) -> Any:
    """A callback that holds each step back until it is asked for, and answers with its seconds and loss."""
    from transformers import TrainerCallback

    class Turns(TrainerCallback):
        started = seconds = 0.0

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            answer(versions=versions)

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            if not sys.stdin.readline():
                # Nobody asks for more; the trainer has no gentler way out of a step that has begun.
                os._exit(0)
            self.started = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.seconds = time.perf_counter() - self.started

        def on_log(self, arguments: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if logs and "loss" in logs:
                answer(seconds=self.seconds, loss=float(logs["loss"]))

    return Turns()


if __name__ == "__main__":
    serve(json.loads(Path(sys.argv[1]).read_text()))
