"""Run TRL's DPOTrainer on the cases of cases.py and write what it reports.

    PYTHON_WITH_TRL tests/parity/record_trl.py [--out FILE]

Needs trl (recorded with 1.16.0), torch and transformers, not this project. Without --out it replaces
trl_1_16.json.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from datasets import Dataset, disable_progress_bars
from transformers import AutoModelForCausalLM, TrainerCallback

# A Python that has TRL need not have this project.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.parity.cases import CASES, METRICS, POLICY_SEED, build_model, checksum, token_line

# TRL is imported where it is used: pytest imports every file, also where there is no TRL.
RECORDED = Path(__file__).with_name("trl_1_16.json")


class Log(TrainerCallback):
    """Keeps every line the trainer logs for an optimizer step."""

    def __init__(self):
        self.steps = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.steps.append({name: logs[name] for name in (*METRICS, "num_tokens")})


def trainer_settings(case, folder):
    """The settings of a case, by TRL's names."""
    from trl import DPOConfig

    return DPOConfig(
        output_dir=str(folder / "out"),
        use_cpu=True,
        bf16=False,  # on by default
        gradient_checkpointing=False,  # on by default
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        loss_type=[case.loss_type],
        beta=case.beta,
        label_smoothing=case.label_smoothing,
        optim={"adamw": "adamw_torch", "sgd": "sgd"}[case.optimizer],
        learning_rate=case.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=0.0,  # off; the norm is logged all the same
        per_device_train_batch_size=case.batch_size,
        gradient_accumulation_steps=case.accumulation,
        max_steps=case.steps,
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def run_case(case, folder):
    """Per-step metrics, token ids and weight checksums of one run."""
    from trl import DPOTrainer

    build_model(POLICY_SEED).save_pretrained(folder / "policy")
    case.tokenizer.save_pretrained(folder / "policy")
    reference = None
    if case.reference_seed is not None:
        build_model(case.reference_seed).save_pretrained(folder / "reference")
        reference = AutoModelForCausalLM.from_pretrained(folder / "reference", dtype=torch.float32)
    log = Log()
    trainer = DPOTrainer(
        model=str(folder / "policy"),  # a path, so that TRL itself loads its reference from it
        ref_model=reference,
        args=trainer_settings(case, folder),
        train_dataset=Dataset.from_list(case.dataset),
        processing_class=case.tokenizer,
        callbacks=[log],
    )
    weights = {"policy": checksum(trainer.model), "reference": checksum(trainer.ref_model)}
    token_ids = [token_line(row["prompt_ids"], row["chosen_ids"], row["rejected_ids"]) for row in trainer.train_dataset]
    trainer.train()
    return {"settings": asdict(case), "weights": weights, "steps": log.steps, "token_ids": token_ids}


def main():
    import trl

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RECORDED)
    out = parser.parse_args().out
    disable_progress_bars()
    record = {
        "versions": {
            "trl": trl.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "cases": {},
    }
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            record["cases"][name] = run_case(case, Path(folder))
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="ascii")
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
