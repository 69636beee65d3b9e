#!/usr/bin/env bash
# Lint, format, types and all tests:  bash tests/run.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/make_venv.sh
make_venv gguf,dev
choose_device

# A build that was killed leaves a lock in this folder on which every later run waits; so each run has its own.
TORCH_EXTENSIONS_DIR="$(mktemp -d)"
export TORCH_EXTENSIONS_DIR
trap 'rm -rf "$TORCH_EXTENSIONS_DIR"' EXIT
# The tests' matrices are too small to gain from threads.
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
# Random files for the loader, for so long.
export FUZZ_SECONDS=60

failed=()
check() {
    local name="$1"
    shift
    say "$name"
    "$@" || failed+=("$name")
}
check "ruff check" python -m ruff check .
check "ruff format" python -m ruff format --check .
check "mypy" python -m mypy
check "pytest" python -m pytest "$@"

if ((${#failed[@]})); then
    stop "failed: $(IFS=,; echo "${failed[*]}")."
fi
say "all checks passed"
