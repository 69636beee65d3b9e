"""Whether the job was started as it was meant to be. Entry: `check_launch`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ds_stochdpo.job.hostfile import read_hostfile
from ds_stochdpo.job.launcher import find_launchers

_HOSTFILE = ("-H", "--hostfile")
DEEPSPEED_SWITCHES = (
    "--module", "--no_python", "--no_local_rank", "--no_ssh", "--no_ssh_check", "--force_multi", "--save_pid",
    "--bind_cores_to_rank", "-q", "--quiet", "-h", "--help",
)  # fmt: skip
"""Options of the deepspeed command that take no value; all others take one."""


def check_launch() -> None:
    """Read the host file that the deepspeed command above this process names, if it names one.

    Raises:
        LaunchError: If it is missing, in which case DeepSpeed has started this machine alone, or wrong.
    """
    for launcher in find_launchers():
        named = named_hostfile(launcher.command)
        if named is not None:
            read_hostfile((launcher.folder or Path()) / named)


def named_hostfile(command: Sequence[str]) -> str | None:
    """What a deepspeed command line gives as its host file; options after the script's name are the script's.

    Args:
        command: Command line of the launcher, with its interpreter or not.
    """
    names = [Path(part).name for part in command]
    if "deepspeed" not in names[:3]:
        return None
    options = iter(command[names.index("deepspeed") + 1 :])
    for option in options:
        if not option.startswith("-"):
            return None
        name, equals, value = option.partition("=")
        if name in _HOSTFILE:
            return value if equals else next(options, None)
        if not equals and name not in DEEPSPEED_SWITCHES:
            next(options, None)
    return None
