"""Hosts for tests: namespaces of this machine, each with its own network, processes, host name, /tmp and /dev/shm.

They hang on a bridge in a namespace of its own, so the machine's network is never touched, and nothing has a name that
could be left behind: each host lives as long as a process that waits for the end of a pipe which only the test holds.
Knows nothing of Ray.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_HOSTS = 8
LIFE_S = 900  # of a host, whatever happens to the test
COMMAND_S = 60.0
TOOLS = ("ip", "bridge", "unshare", "nsenter", "mount", "timeout")
BRIDGE = "switch"
NETWORK = "10.77.31"
NOBODY = "02:00:00:00:00:01"
SHARED_MEMORY = "512m"
SEARCHED = ("/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin")

# The first process of a host. Ignoring SIGCHLD makes the kernel itself forget the orphans that it inherits.
FIRST = """
trap '' CHLD
set -e
hostname "$1"
mount --bind /tmp /mnt
mount --bind "$2" /tmp
mount -t tmpfs -o "size=$3" k3ray /dev/shm
ip link set lo up
shift 3
for kept; do mkdir -p "/tmp/$kept"; mount --bind "/mnt/$kept" "/tmp/$kept"; done
umount /mnt
echo ready
exec cat
"""


class NoHosts(Exception):
    """This machine or this user cannot make hosts; the message says why."""


@dataclass(frozen=True, slots=True)
class Host:
    """One host. pid: its first process, as this machine numbers it. folder: its /tmp, as this machine sees it."""

    name: str
    address: str
    pid: int
    folder: Path
    keeper: subprocess.Popen[str]

    @property
    def home(self) -> Path:
        """The home folder, as this machine sees it; inside it is /tmp/home."""
        return self.folder / "home"

    def entered(self, command: Sequence[str]) -> list[str]:
        """The command, as this machine starts it inside the host."""
        return ["nsenter", f"--target={self.pid}", "--net", "--mount", "--pid", "--uts", "--ipc", "--", *command]


class Hosts:
    """Some hosts on one bridge. Use it as a context: at the end everything is gone, whatever has happened."""

    def __init__(self, folder: Path, kept: Iterable[Path] = ()) -> None:
        """folder: where each host has its /tmp. kept: folders that hosts see even where they lie in this one's /tmp, as
        they do the project and its Python.

        Raises NoHosts.
        """
        self._folder = folder
        seen = {ROOT, Path(sys.prefix), *kept}
        self._kept = sorted({str(path.relative_to("/tmp")) for path in seen if path.is_relative_to("/tmp")})
        self._made = 0
        self.hosts: list[Host] = []
        self._switch = self._first_process("switch")
        try:
            self._ip("link", "add", BRIDGE, "type", "bridge")
            self._ip("link", "set", BRIDGE, "up")
        except NoHosts:
            _end(self._switch)
            raise

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def add(self) -> Host:
        """One host more, with the next address; raises NoHosts."""
        if self._made == MAX_HOSTS:
            raise NoHosts(f"a test makes at most {MAX_HOSTS} hosts")
        self._made += 1
        host = self._first_process(f"host-{self._made}")
        self.hosts.append(host)
        port = _port(host)
        self._ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
        self._ip("link", "set", port, "master", BRIDGE, "up")
        for command in (
            ["addr", "add", f"{host.address}/24", "dev", "eth0"],
            ["link", "set", "eth0", "up"],
            ["route", "add", "default", "dev", "eth0"],
        ):
            _on_network(host, ["ip", *command])
        return host

    def start(self, host: Host, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Inside:
        """Start a command in the host's own HOME; it sees nothing of this process's environment."""
        path = ":".join(SEARCHED)
        variables = {"PATH": path, "HOME": "/tmp/home", "LANG": "C.UTF-8", **(environment or {})}
        process = subprocess.Popen(
            host.entered(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=variables,
            cwd="/",
            start_new_session=True,
        )
        return Inside(process)

    def run(
        self,
        host: Host,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        timeout_s: float = COMMAND_S,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; subprocess.TimeoutExpired after killing it otherwise."""
        return self.start(host, command, environment).finish(timeout_s)

    def cut(self, host: Host) -> None:
        """Drop everything to and from the host without a word to either side: no reset, no lost carrier."""
        self._bridge_state(host, "0")

    def unplug(self, host: Host) -> None:
        """Take the link down: both sides see the carrier go."""
        self._ip("link", "set", _port(host), "down")

    def mend(self, host: Host) -> None:
        """Undo cut or unplug."""
        self._ip("link", "set", _port(host), "up")
        self._bridge_state(host, "3")

    def cut_between(self, one: Host, other: Host) -> None:
        """Drop everything between two hosts without a word to either: what they send there has nobody's address."""
        for host, far in ((one, other), (other, one)):
            entry = ["neigh", "replace", far.address, "lladdr", NOBODY, "dev", "eth0", "nud", "permanent"]
            _on_network(host, ["ip", *entry])

    def mend_between(self, one: Host, other: Host) -> None:
        """Undo cut_between."""
        for host, far in ((one, other), (other, one)):
            _on_network(host, ["ip", "neigh", "del", far.address, "dev", "eth0"])

    def kill(self, host: Host) -> None:
        """Kill all processes of a host at once; the other hosts see their connections closed."""
        _end(host)
        self.hosts.remove(host)

    def power_off(self, host: Host) -> None:
        """Kill a host that has no time to close its connections: the others only see silence."""
        self.cut(host)
        self.kill(host)

    def processes(self, host: Host) -> dict[int, str]:
        """The command lines of a host's living processes without its first one, by its own process numbers."""
        script = (
            'for one in /proc/[0-9]*; do n=${one#/proc/}; [ "$n" != 1 ] && [ "$n" != $$ ] && '
            "echo \"$n $(tr '\\0' ' ' < $one/cmdline)\"; done 2>/dev/null; true"
        )
        lines = self.run(host, ["sh", "-c", script]).stdout.splitlines()
        found = {int(line.split()[0]): line.partition(" ")[2].strip() for line in lines}
        return {pid: line for pid, line in found.items() if line and not line.startswith(("tr ", "sh -c for one"))}

    def shared_memory(self, host: Host) -> set[str]:
        """The names in the host's /dev/shm."""
        return set(self.run(host, ["ls", "-A", "/dev/shm"]).stdout.split())

    def close(self) -> None:
        """End every host and the bridge; closing twice does nothing."""
        for host in (*self.hosts, self._switch):
            _end(host)
        self.hosts.clear()

    def _first_process(self, name: str) -> Host:
        missing = [tool for tool in TOOLS if shutil.which(tool) is None]
        if missing or os.geteuid() != 0:
            raise NoHosts(f"hosts need root and {', '.join(TOOLS)}: " + (", ".join(missing) or "not root"))
        folder = self._folder / name
        (folder / "home").mkdir(parents=True)
        kinds = ("--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc")
        keeper = subprocess.Popen(
            [
                *("timeout", "--signal=KILL", str(LIFE_S), "unshare", *kinds),
                *("sh", "-c", FIRST, "k3ray-host", name, str(folder), SHARED_MEMORY, *self._kept),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert keeper.stdout is not None and keeper.stderr is not None
        if keeper.stdout.readline() != "ready\n":
            keeper.kill()
            raise NoHosts(f"no namespaces here: {keeper.stderr.read().strip() or 'unshare ended'}")
        pid = _only_child(_only_child(keeper.pid))
        return Host(name, f"{NETWORK}.{self._made}", pid, folder, keeper)

    def _ip(self, *command: str) -> None:
        _on_network(self._switch, ["ip", *command])

    def _bridge_state(self, host: Host, state: str) -> None:
        _on_network(self._switch, ["bridge", "link", "set", "dev", _port(host), "state", state])


class Inside:
    """A command that runs in a host."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def signal(self, number: int) -> None:
        """Send a signal to the command itself, as a terminal would."""
        os.kill(_only_child(self.process.pid), number)

    def finish(self, timeout_s: float = COMMAND_S) -> subprocess.CompletedProcess[str]:
        """Wait for the end; subprocess.TimeoutExpired with what was written so far after killing it otherwise."""
        try:
            out, err = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            out, err = self.process.communicate(timeout=COMMAND_S)
            raise subprocess.TimeoutExpired(self.process.args, timeout_s, out, err) from None
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, out, err)


def _port(host: Host) -> str:
    return f"to-{host.name}"


def _only_child(pid: int) -> int:
    deadline = time.monotonic() + COMMAND_S
    while time.monotonic() < deadline:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if children:
            return int(children[0])
        time.sleep(0.01)  # between the fork and its entry
    raise NoHosts(f"process {pid} has no child")


def _on_network(host: Host, command: Sequence[str]) -> None:
    """Run a command of this machine on a host's network: processes keep this machine's numbers."""
    entered = ["nsenter", f"--target={host.pid}", "--net", *command]
    done = subprocess.run(entered, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode:
        raise NoHosts(f"{' '.join(command)}: {done.stderr.strip()}")


def _end(host: Host) -> None:
    """Kill the first process, and with it every other one of the host."""
    if host.keeper.poll() is None:
        os.kill(host.pid, signal.SIGKILL)
    host.keeper.communicate(timeout=COMMAND_S)
