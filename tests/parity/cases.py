"""Model, tokenizers, rows and settings that TRL and this project both run; imports nothing of the project."""

import hashlib
from dataclasses import dataclass

import torch

from tests.tiny import tiny_llama, tiny_tokenizer

CONTEXT = 256
METRICS = (
    "loss",
    "grad_norm",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)
POLICY_SEED = 11

# Boundaries on purpose: a response that starts with a space, a prompt whose last space does not stay a token
# by itself, responses with a common start, one that holds the end token already, one of a single character.
PLAIN_ROWS = [
    {
        "prompt": "Q: which city is the capital of France? A:",
        "chosen": " Paris.",
        "rejected": " Lyon, I believe.",
    },
    {"prompt": "Name one colour. ", "chosen": "Blue. Another. Green.", "rejected": "eight"},
    {
        "prompt": "How long does an egg boil?\n",
        "chosen": "Boil the egg for eight minutes.",
        "rejected": "An hour.",
    },
    {"prompt": "Count to ten: 1 2 3", "chosen": " 4 5 6 7 8 9 10", "rejected": " 4 5 6 46 46 46 46 46 46 46"},
    {"prompt": "Say yes.", "chosen": " Yes.<|im_end|>", "rejected": " No."},
    {"prompt": "Next letter after A?\n", "chosen": "B", "rejected": "It is the letter that comes next."},
    {"prompt": "Translate 'green' to German:", "chosen": " gr\u00fcn", "rejected": " verde \u2013 or so"},
    {"prompt": "1 2 3 4 5 6 7 8 9 10", "chosen": " 11", "rejected": " 46 46 46"},
]


def _turns(*texts):
    return [{"role": role, "content": text} for role, text in texts]


CHAT_ROWS = [
    {
        "prompt": _turns(("user", row["prompt"].strip())),
        "chosen": _turns(("assistant", row["chosen"].strip().removesuffix("<|im_end|>"))),
        "rejected": _turns(("assistant", row["rejected"].strip())),
    }
    for row in PLAIN_ROWS[:6]
] + [
    {
        "prompt": _turns(
            ("system", "Name one colour."), ("user", "Another."), ("assistant", "Green."), ("user", "More.")
        ),
        "chosen": _turns(("assistant", "Blue.")),
        "rejected": _turns(("assistant", "Blue. Another. Green.")),
    },
    {
        "prompt": _turns(("system", "Boil the egg."), ("user", "For eight minutes?")),
        "chosen": _turns(("assistant", "Yes.")),
        "rejected": _turns(("assistant", "1 2 3 4 5 6 7 8 9 10 46")),
    },
]


@dataclass(frozen=True)
class Case:
    """One run. `reference_seed` None: the reference is the initial policy; else a model of other weights."""

    rows: str
    loss_type: str
    reference_seed: int | None
    beta: float = 0.1
    label_smoothing: float = 0.0
    optimizer: str = "adamw"
    learning_rate: float = 1e-3
    batch_size: int = 4
    accumulation: int = 1
    steps: int = 3

    @property
    def pairs_per_step(self):
        return self.batch_size * self.accumulation

    @property
    def dataset(self):
        return CHAT_ROWS if self.rows == "chat" else PLAIN_ROWS

    @property
    def tokenizer(self):
        # A tokenizer that writes a begin token before every text: it must occur once, and only in the prompt.
        return tiny_tokenizer(bos="<s>", adds_bos=True) if self.rows == "plain_bos" else tiny_tokenizer()


CASES = {
    "sigmoid": Case("plain", "sigmoid", None),
    "sigmoid_chat": Case("chat", "sigmoid", 12, optimizer="sgd", learning_rate=0.1, batch_size=2, accumulation=2),
    "hinge_begin_token": Case("plain_bos", "hinge", 12, beta=0.3, batch_size=8),
    "robust_chat": Case("chat", "robust", 12, label_smoothing=0.1),
}


def build_model(seed):
    """Tiny Llama whose weights are whole numbers over a power of two: the same bits on every machine.

    The normal generator of torch differs in the last bit between vector units; whole numbers do not.
    """
    lm = tiny_llama(context=CONTEXT)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(lm.named_parameters()):
            units = torch.randint(-1024, 1024, parameter.shape, generator=generator).float() / 2048
            parameter.copy_(1 + units / 4 if "norm" in name else units)
    return lm


def checksum(lm):
    """sha256 over names and fp32 bytes of all weights."""
    digest = hashlib.sha256()
    for name, parameter in sorted(lm.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().numpy().astype("<f4").tobytes())
    return digest.hexdigest()


def token_line(*parts):
    """Token ids of prompt, chosen and rejected as one line of text."""
    return " | ".join(" ".join(str(int(token)) for token in part) for part in parts)
