# shellcheck shell=bash
# Sourced by launch/quickstart.sh and tests/run.sh from the repository root.
#   make_venv EXTRAS   make or reuse .venv with the project and these extras (gguf or gguf,dev), and put it on PATH
#   choose_device      export DS_ACCELERATOR=cpu when no GPU can be used, and set HAS_GPU to 0 or 1

say() { printf '==> %s\n' "$*"; }
stop() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# Prints the first interpreter that is new enough; PYTHON=... puts one in front. Of a virtual environment it prints the
# interpreter beneath, since .venv itself may be active and is about to be made anew.
find_python() {
    local candidate seen=""
    for candidate in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            "$candidate" -c 'import sys; print(getattr(sys, "_base_executable", None) or sys.executable)'
            return 0
        fi
        seen="$seen $candidate ($("$candidate" --version 2>&1 | head -n 1))"
    done
    [[ -z $seen ]] && stop "no python3 was found; install Python 3.11 or newer, or name one with PYTHON=/path/to/python3."
    stop "Python 3.11 or newer is needed, found only:$seen; install a newer one, or name it with PYTHON=/path/to/python3."
}

# Prints two hashes: of interpreter and place (another one: .venv is made anew), and of the dependencies and pins
# (another one: pip brings .venv up to date).
venv_keys() {
    "$1" - <<'PY'
import hashlib, os, pathlib, sys
pins = b"".join(pathlib.Path(name).read_bytes() for name in ("pyproject.toml", ".ci/constraints.txt"))
place = f"{sys.version} {os.getcwd()}".encode()
print(hashlib.sha256(place).hexdigest(), hashlib.sha256(pins).hexdigest())
PY
}

make_venv() {
    local extras="$1" stamp=.venv/ds_stochdpo.stamp interpreter keys place pins had_place="" had_pins="" had_extras=""
    # A foreign folder on this path would hide the pinned versions.
    unset PYTHONPATH PYTHONHOME
    interpreter="$(find_python)"
    keys="$(venv_keys "$interpreter")"
    read -r place pins <<<"$keys"
    if [[ -f $stamp && -x .venv/bin/python ]]; then
        read -r had_place had_pins had_extras <"$stamp" || true
    fi
    if [[ $had_place != "$place" ]]; then
        create_venv "$interpreter"
    fi
    # An environment with more extras serves one who asks for fewer.
    if [[ $had_place == "$place" && $had_pins == "$pins" && ",$had_extras," == *",$extras,"* ]]; then
        say "reusing .venv (delete the folder to make it anew)"
    else
        install_project "$extras"
        echo "$place $pins $extras" >"$stamp"
    fi
    export VIRTUAL_ENV="$PWD/.venv" PATH="$PWD/.venv/bin:$PATH"
}

create_venv() {
    local interpreter="$1"
    say "making .venv with $("$interpreter" --version)"
    "$interpreter" -c 'import venv, ensurepip' 2>/dev/null ||
        stop "$interpreter has no venv module with pip; install it (Debian and Ubuntu: apt-get install python3-venv)."
    "$interpreter" -m venv --clear .venv || stop "could not make the folder .venv; check free disk space and permissions."
}

install_project() {
    local extras="$1" torch_pin
    say "installing the pinned versions (1 to 5 minutes the first time; PyTorch is the largest part)"
    torch_pin="$(grep '^torch==' .ci/constraints.txt)"
    # PyTorch first and alone, so that pip takes a CPU build when it is offered one with this version.
    .venv/bin/python -m pip install --disable-pip-version-check "$torch_pin" ||
        stop "pip could not install $torch_pin; its message is above (network, disk space, or no build for this platform)."
    .venv/bin/python -m pip install --disable-pip-version-check -e ".[$extras]" -c .ci/constraints.txt ||
        stop "pip could not install the project's dependencies; its message is above."
}

choose_device() {
    HAS_GPU=0
    if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then
        if python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
            HAS_GPU=1
        else
            say "there is a GPU, but the installed PyTorch cannot use it; running on the CPU"
        fi
    fi
    if ((!HAS_GPU)); then
        export DS_ACCELERATOR=cpu
    fi
}
