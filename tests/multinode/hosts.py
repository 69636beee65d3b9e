"""Two hosts on one machine: network namespaces joined by a virtual cable, each with its name and sshd. Needs root."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
PROGRAMS = {"ip": "iproute2", "ssh": "openssh-client", "ssh-keygen": "openssh-client", "pdsh": "pdsh"}


def missing():
    """Why there can be no hosts here; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = {package for program, package in PROGRAMS.items() if shutil.which(program) is None}
    if SSHD is None:
        absent.add("openssh-server")
    if absent:
        return f"not installed: {', '.join(sorted(absent))}"
    probe = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, text=True)
    return f"no right to make network namespaces: {probe.stderr.strip()}" if probe.returncode else ""


def run(*command):
    subprocess.run(command, check=True, capture_output=True, text=True)


class Hosts:
    """As a context manager: two hosts for the time of a block, of which nothing stays.

    Attributes:
        names: Their host names; both know both.
        addresses: Their addresses, in a network of their own.
        hostfile: A host file with one slot each.
        ssh_config: For `ssh -F`.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        tag = f"{os.getpid() % 100000}"
        self.spaces = [f"dpo{tag}{letter}" for letter in "ab"]
        self.cables = [f"vc{tag}{letter}" for letter in "ab"]
        self.names = ["node-a", "node-b"]
        self.addresses = ["10.79.0.1", "10.79.0.2"]
        self.hostfile, self.ssh_config = self.folder / "hostfile", self.folder / "ssh_config"

    def __enter__(self):
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for space in self.spaces:
            pid_file = self.folder / f"{space}.pid"
            if pid_file.exists():
                os.kill(int(pid_file.read_text()), signal.SIGTERM)
                pid_file.unlink(missing_ok=True)
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / space, ignore_errors=True)

    def inside(self, index, command):
        """The command line that runs `command` on a host."""
        named = f'hostname {self.names[index]}; exec "$@"'
        return ["ip", "netns", "exec", self.spaces[index], "unshare", "--uts", "bash", "-c", named, "-", *command]

    def cable(self, state):
        """Plug the cable "up" or pull it "down", at the second host."""
        run("ip", "-n", self.spaces[1], "link", "set", self.cables[1], state)

    def _build(self):
        for space in self.spaces:
            run("ip", "netns", "add", space)
            run("ip", "-n", space, "link", "set", "lo", "up")
        (space_a, space_b), (cable_a, cable_b) = self.spaces, self.cables
        run("ip", "link", "add", cable_a, "netns", space_a, "type", "veth", "peer", "name", cable_b, "netns", space_b)
        for space, cable, address in zip(self.spaces, self.cables, self.addresses, strict=True):
            run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", cable)
            run("ip", "-n", space, "link", "set", cable, "up")
        for name in ("id", "host_key"):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name))
        # Made by root outside the tests as well; sshd refuses to start without it.
        Path("/run/sshd").mkdir(parents=True, exist_ok=True)
        known = "".join(f"{a} {n}\n" for a, n in zip(self.addresses, self.names, strict=True))
        for index, space in enumerate(self.spaces):
            # `ip netns exec` lays this file over /etc/hosts.
            Path("/etc/netns", space).mkdir(parents=True, exist_ok=True)
            Path("/etc/netns", space, "hosts").write_text(f"127.0.0.1 localhost\n{known}")
            self._start_sshd(index)
        hosts = "".join(f"Host {n}\n  HostName {a}\n" for n, a in zip(self.names, self.addresses, strict=True))
        self.ssh_config.write_text(
            f"{hosts}Host *\n  IdentityFile {self.folder / 'id'}\n  IdentitiesOnly yes\n  BatchMode yes\n"
            "  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
        )
        self.hostfile.write_text("".join(f"{name} slots=1\n" for name in self.names))

    def _start_sshd(self, index):
        space = self.spaces[index]
        config = self.folder / f"{space}.conf"
        config.write_text(
            f"ListenAddress {self.addresses[index]}\nHostKey {self.folder / 'host_key'}\n"
            f"AuthorizedKeysFile {self.folder / 'id.pub'}\nPidFile {self.folder / f'{space}.pid'}\n"
            "PermitRootLogin prohibit-password\nPasswordAuthentication no\nUsePAM no\nStrictModes no\n"
        )
        run(*self.inside(index, [SSHD, "-f", str(config), "-E", str(self.folder / f"{space}.log")]))
        deadline = time.monotonic() + 30
        while not (self.folder / f"{space}.pid").exists():
            assert time.monotonic() < deadline, (self.folder / f"{space}.log").read_text()
            time.sleep(0.05)
