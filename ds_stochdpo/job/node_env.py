"""The environment that reaches the other machines, and whether all ranks have the same. Entry: `read_env_file`."""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path

from ds_stochdpo.engine import Ranks
from ds_stochdpo.errors import LaunchError
from ds_stochdpo.job.software import versions

logger = logging.getLogger(__name__)

FORWARDED = ("PYTHON", "MLFLOW", "MV2", "UCX", "NCCL")
"""Beginnings of the variables that the deepspeed launcher sends along by itself (NCCL on CUDA only)."""
NEEDED = (
    "DS_ACCELERATOR", "GLOO_SOCKET_IFNAME", "HF_DATASETS_OFFLINE", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE",
    "LD_LIBRARY_PATH", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "TORCH_EXTENSIONS_DIR",
    "TRANSFORMERS_OFFLINE", "XDG_CACHE_HOME",
)  # fmt: skip
"""Variables that change what a rank does, so that a machine without them behaves differently."""
SAME = ("DS_ACCELERATOR", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "HF_HOME")
"""Those on which the ranks are compared; a path may differ for good reasons, so none of them is an error."""
_SECRET = re.compile(r"TOKEN(?!IZER)|SECRET|PASSW|CREDENTIAL|PRIVATE|(^|_)(KEY|API)(_|$)", re.IGNORECASE)
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_EXPANDED = re.compile(r'["`$\\]')


def read_env_file(path: Path) -> tuple[dict[str, str], list[str]]:
    """Variables of a `.deepspeed_env` file, and what is wrong with it for DeepSpeed 0.19.8.

    Args:
        path: Lines `KEY=VALUE`; a value may hold further equals signs.

    Returns:
        The variables, with blank and comment lines passed over; a sentence with file and line for each such line and
        for any other one that DeepSpeed or the shell of a machine would trip over.

    Raises:
        LaunchError: If the file cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"the environment file {path} cannot be read: {error}.") from None
    values: dict[str, str] = {}
    problems: list[str] = []
    for number, line in enumerate(lines, start=1):
        key, equals, value = line.partition("=")
        key, value = key.strip(), value.strip()
        where = f"{path}:{number}"
        if not line.strip():
            problems.append(f"{where}: a blank line, on which the deepspeed launcher fails; remove it.")
        elif line.lstrip().startswith("#"):
            problems.append(f"{where}: a comment, on which the deepspeed launcher or the machines fail; remove it.")
        elif not equals or not _KEY.fullmatch(key):
            problems.append(f"{where}: {mask(key, key)!r} is no KEY=VALUE; write one variable a line.")
        else:
            values[key] = value
            if _EXPANDED.search(value):
                problems.append(
                    f"{where}: the value of {key} holds one of \" ` $ \\, which the machines' shell expands."
                )
    return values, problems


def env_files(environment: Mapping[str, str], folder: Path) -> list[Path]:
    """Files that the deepspeed launcher would read, in its order; a later one wins.

    Args:
        environment: Its variables; `DS_ENV_FILE` gives the name.
        folder: Its working folder.
    """
    name = environment.get("DS_ENV_FILE", ".deepspeed_env")
    home = Path(environment.get("HOME", "~")).expanduser()
    return list(dict.fromkeys(path for path in (home / name, folder / name) if path.is_file()))


def forwarded(environment: Mapping[str, str], *, has_cuda: bool) -> dict[str, str]:
    """Variables that reach the machines without a file."""
    beginnings = FORWARDED if has_cuda else tuple(b for b in FORWARDED if b != "NCCL")
    return {key: value for key, value in sorted(environment.items()) if key.startswith(beginnings)}


def mask(key: str, value: str) -> str:
    """The value, or stars where the key looks like that of a secret."""
    return "********" if _SECRET.search(key) else value


def check_ranks_agree(ranks: Ranks) -> None:
    """Compare versions and environment of all ranks. Collective: one gather.

    Args:
        ranks: This process among the others.

    Raises:
        LaunchError: If the ranks run different versions, alike on all of them.
    """
    own = {"versions": versions(), "environment": {key: os.environ.get(key) for key in SAME}}
    notes = ranks.gather_objects((socket.gethostname(), own))
    for name in sorted({name for _, note in notes for name in note["versions"]}):
        found = {rank: note["versions"].get(name, "none") for rank, (_, note) in enumerate(notes)}
        if len(set(found.values())) > 1:
            raise LaunchError(
                f"the ranks run different versions of {name}: {_by_value(found, notes)}; "
                "install the same on each machine."
            )
    for key in SAME:
        found = {rank: str(note["environment"][key]) for rank, (_, note) in enumerate(notes)}
        if len(set(found.values())) > 1 and ranks.is_main:
            logger.warning(
                "%s differs: %s; put it into .deepspeed_env, or set it on each machine.", key, _by_value(found, notes)
            )


def _by_value(found: dict[int, str], notes: list[tuple[str, dict]]) -> str:
    shares: dict[str, list[str]] = {}
    for rank, value in found.items():
        shares.setdefault(value, []).append(f"{rank} ({notes[rank][0]})")
    return "; ".join(f"{value} on rank {', '.join(who[:4])}{', ...' * (len(who) > 4)}" for value, who in shares.items())
