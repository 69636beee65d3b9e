#!/usr/bin/env bash
# From a fresh checkout to a trained model and its report:  bash launch/quickstart.sh
# Needs Python 3.11+, about 12 GB of memory and 4 GB of disk. A second call reuses what the first one made.
# QUICKSTART_RANKS=1 runs one process instead of two.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/make_venv.sh

say "1/4  Python environment"
make_venv gguf
choose_device
export TOKENIZERS_PARALLELISM=false

say "2/4  model and preference pairs (98 MB download and a conversion, about 1 minute the first time)"
python launch/prepare_quickstart.py

# From here on nothing is fetched; a hub look-up would be a mistake, and fails at once.
export HF_HUB_OFFLINE=1
cores="$(python -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')"
if ((HAS_GPU)); then
    devices="$(nvidia-smi -L | grep -c GPU)"
else
    devices="$cores"
fi
# Two ranks so that ZeRO-3 has something to shard, where there are two devices or cores for them.
ranks="${QUICKSTART_RANKS:-$((devices > 1 ? 2 : 1))}"
[[ $ranks == 1 || $ranks == 2 ]] || stop "QUICKSTART_RANKS is '$ranks'; it must be 1 or 2."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores / ranks > 0 ? cores / ranks : 1))}"
# An optimizer step is 4 pairs either way: the recipe has 2 a rank, one rank takes two micro-steps.
port="$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"

say "3/4  training on $ranks rank(s), $OMP_NUM_THREADS thread(s) each (about 3 minutes on 2 CPU cores)"
deepspeed --num_accelerators "$ranks" --master_port "$port" --log_level error launch/train.py \
    --config launch/recipes/quickstart.yaml --gradient_accumulation_steps "$((2 / ranks))" --overwrite_output_dir true ||
    stop "training failed; the message of the first rank that stopped is above."

say "4/4  stock DPO, exact packed DPO and pruned DPO side by side on the same pairs (about 5 minutes on 2 CPU cores)"
# One variant runs at a time, so it has all cores.
OMP_NUM_THREADS="$cores" python launch/bench.py --config launch/recipes/quickstart.yaml --output_dir outputs/quickstart_bench \
    --layers 0 --batch_size 4 --rounds 3 --draws 2 --variants stock exact all ||
    stop "the comparison failed; the trained model and its report are in outputs/quickstart all the same."

say "done: model, metrics.jsonl and report.html are in outputs/quickstart, the comparison in outputs/quickstart_bench"
