"""The machines that the deepspeed launcher starts ranks on: host file and filters, checked. Entry: `plan_hosts`.

DeepSpeed 0.19.8 passes over a host file that is missing and then trains on this machine alone, and it names no line of
one that is wrong.
"""

from __future__ import annotations

import re
from pathlib import Path

from ds_stochdpo.errors import LaunchError

_LINE = re.compile(r"(\S+)\s+slots=(\d+)")
_NODE = re.compile(r"([^:@,\s]+)(?::(\d+(?:,\d+)*))?")


def read_hostfile(path: Path) -> dict[str, int]:
    """Machines and their slots (ranks), in the order of the file.

    Args:
        path: Lines `name slots=N`; blank lines and lines that start with # are passed over.

    Raises:
        LaunchError: With file and line, if it cannot be read, names no machine, or one twice, or a line is wrong.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise LaunchError(
            f"hostfile is {str(path)!r}, which cannot be read: {reason}. The deepspeed launcher goes on without it, on "
            "this machine alone."
        ) from None
    hosts: dict[str, int] = {}
    first: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = _LINE.fullmatch(text)
        if match is None or match[2].strip("0") == "":
            raise LaunchError(f"{path}:{number}: {text!r} is no machine; write 'name slots=N' with N of at least 1.")
        if match[1] in hosts:
            raise LaunchError(f"{path}:{number}: {match[1]} is in line {first[match[1]]} already; name a machine once.")
        hosts[match[1]], first[match[1]] = int(match[2]), number
    if not hosts:
        raise LaunchError(f"{path}: names no machine; write a line 'name slots=N' for each.")
    return hosts


def plan_hosts(
    hosts: dict[str, int], *, include: str = "", exclude: str = "", num_nodes: int = -1, num_gpus: int = -1
) -> dict[str, list[int]]:
    """Slots that are used on each machine, as the deepspeed launcher picks them.

    Args:
        hosts: Slots of each machine.
        include: `name[:slot,slot]` joined by @; a machine without slots means all of them.
        exclude: Likewise, what is left out.
        num_nodes: Use the first machines only; -1: all.
        num_gpus: Use the first slots of each only; -1: all.

    Raises:
        LaunchError: If a filter names a machine or slot that is not there, or nothing is left.
    """
    if include and exclude:
        raise LaunchError("--include and --exclude are both given; keep one of them.")
    if (include or exclude) and (num_nodes >= 0 or num_gpus >= 0):
        raise LaunchError("--num_nodes and --num_gpus do not go with --include and --exclude; keep one kind.")
    slots = {host: list(range(count)) for host, count in hosts.items()}
    if include:
        named = _filter("--include", include, slots)
        slots = {host: named[host] for host in slots if host in named}
    if exclude:
        named = _filter("--exclude", exclude, slots)
        slots = {host: [s for s in own if s not in named.get(host, [])] for host, own in slots.items()}
        slots = {host: own for host, own in slots.items() if own}
    if not slots:
        raise LaunchError("no machine is left after --exclude.")
    return _first(slots, num_nodes, num_gpus)


def _first(slots: dict[str, list[int]], num_nodes: int, num_gpus: int) -> dict[str, list[int]]:
    if num_nodes > len(slots):
        raise LaunchError(f"--num_nodes is {num_nodes}, but the host file names {len(slots)} machines.")
    if num_nodes > 0:
        slots = dict(list(slots.items())[:num_nodes])
    if num_gpus > 0:
        for host, own in slots.items():
            if num_gpus > len(own):
                raise LaunchError(f"--num_gpus is {num_gpus}, but {host} has {len(own)} slots.")
        slots = {host: own[:num_gpus] for host, own in slots.items()}
    return slots


def _filter(option: str, text: str, slots: dict[str, list[int]]) -> dict[str, list[int]]:
    named: dict[str, list[int]] = {}
    for part in text.split("@"):
        match = _NODE.fullmatch(part)
        if match is None:
            raise LaunchError(f"{option} is {text!r}, where {part!r} is no machine; write name or name:slot,slot.")
        host, picked = match[1], match[2]
        if host not in slots:
            raise LaunchError(f"{option} names {host}, which is not in the host file: {', '.join(slots)}.")
        wanted = slots[host] if picked is None else sorted({int(s) for s in picked.split(",")})
        if missing := [s for s in wanted if s not in slots[host]]:
            raise LaunchError(f"{option} names slot {missing[0]} of {host}, which has slots 0 to {slots[host][-1]}.")
        named[host] = sorted({*named.get(host, []), *wanted})
    return named
