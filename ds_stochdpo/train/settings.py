"""Command line and YAML to settings: one name for key, flag and field. Entry: `parse_settings`."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser

from ds_stochdpo.config import StochDPOConfig
from ds_stochdpo.errors import ConfigError, LaunchError

_YAML_NULL = ("", "null", "~")
_LAUNCHER_OPTIONS = (
    "-H", "--hostfile", "-i", "--include", "-e", "--exclude", "--num_nodes", "--num_gpus", "--num_accelerators",
    "--master_port", "--master_addr", "--node_rank", "--launcher", "--launcher_args", "--no_ssh", "--no_ssh_check",
    "--no_local_rank", "--force_multi", "--bind_cores_to_rank", "--bind_core_list", "--ssh_port", "--nnodes",
    "--nproc_per_node", "--nproc-per-node", "--node-rank", "--master-addr", "--master-port", "--rdzv_endpoint",
    "--rdzv-endpoint", "--rdzv_backend", "--rdzv-backend", "--standalone",
)  # fmt: skip
"""Of deepspeed and torchrun: behind the script's name they would be taken for ours."""
_USAGE = "deepspeed launch/train.py --config FILE.yaml [--KEY VALUE ...]"
_DESCRIPTION = (
    "Preference alignment with a stochastically pruned DPO graph. Every key of the YAML file is also a flag, and a "
    "flag wins over the file."
)


def parse_settings(arguments: Sequence[str]) -> StochDPOConfig:
    """Settings of a run.

    Args:
        arguments: Command line without the program's name: `--config FILE` and any `--key value`. The `--local_rank`
            that the deepspeed launcher adds is taken and not used.

    Returns:
        Checked settings.

    Raises:
        ConfigError: If a key or flag is unknown (with the nearest known one), a value has the wrong type, or the
            settings contradict each other.
        LaunchError: If an option of the launcher stands behind the script's name.
    """
    parser = _parser()
    files, _ = _pre_parser().parse_known_args(arguments)
    if files.config is not None:
        # As text, so that a value in the file is read exactly as the same value on the command line.
        parser.set_defaults(**_read_yaml(Path(files.config)))
    try:
        known, unknown = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error.argument_name}: {error.message}.") from None
    if unknown and unknown[0].partition("=")[0] in _LAUNCHER_OPTIONS:
        option = unknown[0].partition("=")[0]
        raise LaunchError(f"{option} is an option of the launcher and comes too late: write it before launch/train.py.")
    if unknown:
        raise ConfigError(f"{unknown[0]} is no setting{_nearest(unknown[0].lstrip('-'))}")
    return StochDPOConfig(**{f.name: getattr(known, f.name) for f in dataclasses.fields(StochDPOConfig)})


class _HelpFormatter(argparse.HelpFormatter):
    """One spelling a flag, and a default only where there is one."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=6)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.dest == "help":
            return super()._format_action_invocation(action)
        values = f"{{{', '.join(map(str, action.choices))}}}" if action.choices else action.dest.upper()
        return f"{action.option_strings[0]} {values}"

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        has_default = action.default not in (None, "", argparse.SUPPRESS)
        return f"{text} [%(default)s]" if has_default else text


def _pre_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", help="YAML file of settings.")
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser


def _parser() -> argparse.ArgumentParser:
    settings: Any = StochDPOConfig
    parser = HfArgumentParser(
        settings,
        prog="launch/train.py",
        usage=_USAGE,
        description=_DESCRIPTION,
        parents=[_pre_parser()],
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    for action in parser._actions:
        if action.dest == "column_mapping":
            action.type = _read_mapping
        if action.dest == "bf16":
            # True, false or unset, for which the parser makes no bare flag; the other switches have one.
            action.nargs, action.const = "?", True
        if any(option.startswith("--no_") for option in action.option_strings):
            # `--no_share_prompt` works; `--share_prompt false` says it already.
            action.help = argparse.SUPPRESS
    return parser


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        # BaseLoader keeps every value as the text that was written: 1e-6, 010 and yes mean what they mean as flags.
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except OSError as error:
        raise ConfigError(f"config is {str(path)!r}, which cannot be read: {error.strerror}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"config is {str(path)!r}, which is not YAML: {error}.") from None
    if values in (None, ""):
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"config is {str(path)!r}, which holds a {type(values).__name__}; write 'key: value' lines.")
    known = {f.name for f in dataclasses.fields(StochDPOConfig)}
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"{path}: {key} is no setting{_nearest(str(key))}")
        if isinstance(value, list) or (isinstance(value, dict) and key != "column_mapping"):
            raise ConfigError(f"{path}: {key} holds a {type(value).__name__}; write one plain value.")
    return {key: None if value in _YAML_NULL else value for key, value in values.items()}


def _read_mapping(text: str) -> dict[str, str]:
    """A mapping written as THEIRS=OURS,THEIRS=OURS, or as a JSON object where names hold a comma."""
    if text.lstrip().startswith("{"):
        try:
            return dict(json.loads(text))
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is no JSON object ({error})") from None
    parts = [part.rpartition("=") for part in text.split(",")]
    mapping = {theirs.strip(): ours.strip() for theirs, _, ours in parts}
    if "" in mapping or len(mapping) < len(parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no mapping; write each column once, as in question=prompt,good=chosen,bad=rejected"
        )
    return mapping


def _nearest(name: str) -> str:
    known = [f.name for f in dataclasses.fields(StochDPOConfig)]
    close = difflib.get_close_matches(name.split("=")[0], known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; see {Path(sys.argv[0]).name} --help."
