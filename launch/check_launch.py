"""What a deepspeed command would start on which machine with which environment; starts nothing.

python launch/check_launch.py --hostfile FILE [options of deepspeed] launch/train.py [settings]

The command line is that of `deepspeed`. Host file, filters and `.deepspeed_env` are checked first; each mistake is
named with file and line. `--write_env FILE` writes the variables that the machines need, as they are set here and in
`.deepspeed_env`, in the form that DeepSpeed can read: start the job with `DS_ENV_FILE=FILE deepspeed ...`.
"""

import argparse
import os
import shlex
import sys
from pathlib import Path

from ds_stochdpo.errors import LaunchError
from ds_stochdpo.job.hostfile import plan_hosts, read_hostfile
from ds_stochdpo.job.launch_checks import DEEPSPEED_SWITCHES
from ds_stochdpo.job.node_env import NEEDED, env_files, forwarded, mask, read_env_file

VALUED = ("--master_port", "--node_rank", "--launcher", "--launcher_args", "--ssh_port", "--bind_core_list",
          "--venv_script", "--log_level", "--enable_each_rank_log")  # fmt: skip
"""Options of the deepspeed command that are taken here and change nothing that is shown."""


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options of the deepspeed command that choose machines, and the script with its own arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("-H", "--hostfile")
    parser.add_argument("-i", "--include", default="")
    parser.add_argument("-e", "--exclude", default="")
    parser.add_argument("--num_nodes", type=int, default=-1)
    parser.add_argument("--num_gpus", "--num_accelerators", type=int, default=-1)
    parser.add_argument("--master_addr", default="")
    parser.add_argument("--write_env", type=Path, metavar="FILE")
    for option in VALUED:
        parser.add_argument(option, help=argparse.SUPPRESS)
    for option in set(DEEPSPEED_SWITCHES) - {"-h", "--help"}:
        parser.add_argument(option, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("script", nargs=argparse.REMAINDER)
    return parser.parse_args(arguments)


def environment_of_nodes(problems: list[str], *, no_ssh: bool) -> tuple[dict[str, str], dict[str, str]]:
    """What reaches the machines, and what is set here, changes a run, and does not; adds to `problems`."""
    reaching = {} if no_ssh else forwarded(os.environ, has_cuda=os.environ.get("DS_ACCELERATOR") != "cpu")
    # Without ssh each machine has its own shell's environment and no other.
    for path in [] if no_ssh else env_files(os.environ, Path.cwd()):
        values, found = read_env_file(path)
        reaching |= values
        problems += found
    missing = {key: os.environ[key] for key in NEEDED if key in os.environ and key not in reaching}
    return reaching, missing


def show(slots: dict[str, list[int]], args: argparse.Namespace, reaching: dict[str, str]) -> None:
    """Print the plan."""
    world_size, rank = sum(map(len, slots.values())), 0
    print(f"{world_size} ranks on {len(slots)} machines, rank 0 at {args.master_addr or next(iter(slots))}")
    for host, own in slots.items():
        print(f"  {host}: ranks {rank} to {rank + len(own) - 1}, slots {', '.join(map(str, own))}")
        rank += len(own)
    print(f"command on each machine, in {Path.cwd()}: {shlex.join(args.script) or '(no script given)'}")
    print("environment of each machine beside its own:")
    for key, value in reaching.items():
        print(f"  {key}={mask(key, value)}")


def main() -> int:
    """Run the command line; returns the exit code: 0, or 2 where something has to be mended."""
    args = parse(sys.argv[1:])
    problems: list[str] = []
    try:
        if args.hostfile is None:
            raise LaunchError("no --hostfile is given: deepspeed would start this machine only.")
        hosts = read_hostfile(Path(args.hostfile))
        slots = plan_hosts(
            hosts, include=args.include, exclude=args.exclude, num_nodes=args.num_nodes, num_gpus=args.num_gpus
        )
        reaching, missing = environment_of_nodes(problems, no_ssh=args.no_ssh)
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return LaunchError.exit_code
    if args.write_env:
        from_files = {k: v for k, v in reaching.items() if k not in forwarded(os.environ, has_cuda=True)}
        text = "".join(f"{key}={value}\n" for key, value in (missing | from_files).items())
        # It may hold secrets that the files held.
        args.write_env.touch(mode=0o600)
        args.write_env.write_text(text, encoding="utf-8")
        reaching, missing, problems = reaching | missing, {}, []
    show(slots, args, reaching)
    for key in missing:
        way_out = "set it in the shell of each" if args.no_ssh else "put it into .deepspeed_env"
        print(f"warning: {key} is set here and does not reach the machines; {way_out}.")
    print("settings of the script are not looked at here: add --dry_run true to its own command for that.")
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return LaunchError.exit_code if problems else 0


if __name__ == "__main__":
    sys.exit(main())
