"""One rank of the ZeRO-3 traffic count; started by `sections.measure_gathers` on two ranks.

Collectives are counted below DeepSpeed, in torch.distributed, whoever asks for them.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SENT: Counter[str] = Counter()


def count(name: str, operand: int) -> None:
    """Replace a collective by one that adds up the bytes of its full-size operand."""
    original = getattr(dist, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        tensor = args[operand] if len(args) > operand else next(iter(kwargs.values()))
        tensors = tensor if isinstance(tensor, list) else [tensor]
        SENT[name] += sum(t.numel() * t.element_size() for t in tensors)
        return original(*args, **kwargs)

    setattr(dist, name, counted)


# Before DeepSpeed is imported, which keeps references of its own.
for collective, full_operand in (("all_gather_into_tensor", 0), ("all_gather", 0), ("reduce_scatter_tensor", 1)):
    count(collective, full_operand)

sys.path.insert(0, str(Path(__file__).parents[1]))

import ds_stochdpo  # noqa: E402
from benchmarking.workload import build_model, load_workload  # noqa: E402
from ds_stochdpo.config import PruningPlan, StochDPOConfig  # noqa: E402


def main() -> None:
    """One warm-up and one counted step of each kind."""
    request = json.loads(Path(sys.argv[1]).read_text())
    pruned = StochDPOConfig(**{**request["settings"], "reference": "none", "max_grad_norm": 0.0, "deepspeed": None})
    exact = StochDPOConfig(**{**pruned.to_dict(), **vars(PruningPlan())})
    zero3 = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    pairs = load_workload(pruned.dataset_name, pruned, 4).pairs
    answer = {}
    for name, config in (("exact", exact), ("pruned", pruned)):
        model = build_model(config, request["layers"], torch.device("cpu"))
        engine = ds_stochdpo.initialize(model=model, config=config, deepspeed=zero3)
        for _ in range(2):
            SENT.clear()
            engine.train_step(pairs[engine.ranks.rank :: engine.ranks.world_size])
        answer[name] = dict(SENT)
    answer["pruned_over_exact"] = sum(answer["pruned"].values()) / sum(answer["exact"].values())
    if dist.get_rank() == 0:
        Path(request["answer"]).write_text(json.dumps({"ranks": dist.get_world_size(), **answer}))


if __name__ == "__main__":
    main()
