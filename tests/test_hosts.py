"""The hosts that tests are run on are separate, can be cut off and killed, and leave nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import Host, Hosts, NoHosts

SERVER = """
import socket
listening = socket.create_server(("0.0.0.0", 7000))
print("ready", flush=True)
while True:
    peer, _ = listening.accept()
    peer.sendall(b"here")
    peer.close()
"""
CLIENT = """
import socket, sys
try:
    print(socket.create_connection((sys.argv[1], 7000), timeout=1.5).recv(4).decode())
except OSError as error:
    print(type(error).__name__)
"""


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Hosts]:
    try:
        hosts = Hosts(tmp_path)
    except NoHosts as reason:
        pytest.skip(str(reason))
    with hosts:
        hosts.add()
        hosts.add()
        yield hosts


def asked(hosts: Hosts, host: Host, other: Host) -> str:
    return hosts.run(host, [sys.executable, "-c", CLIENT, other.address]).stdout.strip()


def test_a_cut_is_silent_and_a_kill_is_not(two: Hosts) -> None:
    first, second = two.hosts
    server = two.start(second, [sys.executable, "-c", SERVER])
    try:
        assert server.process.stdout is not None and server.process.stdout.readline() == "ready\n"
        assert asked(two, first, second) == "here"
        two.cut(second)
        assert asked(two, first, second) == "TimeoutError"
        two.mend(second)
        assert asked(two, first, second) == "here"
        two.unplug(second)
        assert asked(two, first, second) in ("TimeoutError", "OSError")
        two.mend(second)
        two.kill(second)
        assert server.process.wait(10) != 0
    finally:
        server.process.communicate(timeout=10)


def test_hosts_share_nothing_and_leave_nothing(two: Hosts, tmp_path: Path) -> None:
    first, second = two.hosts
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    assert "switch" not in links and "to-host" not in links  # the machine's own network has none of it
    two.run(first, ["touch", "/dev/shm/mine", "/tmp/mine"])
    assert two.shared_memory(first) == {"mine"} and two.shared_memory(second) == set()
    assert (first.folder / "mine").exists() and not (second.folder / "mine").exists()
    assert not Path("/dev/shm/mine").exists() and not Path("/tmp/mine").exists()
    assert two.run(first, ["hostname"]).stdout == "host-1\n"
    sleeper = two.start(first, ["sleep", "300"])
    deadline = time.monotonic() + 10
    while "sleep 300" not in two.processes(first).values() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(two.processes(first).values()) == ["sleep 300"] and not two.processes(second)
    pids = [host.pid for host in two.hosts]
    two.close()
    sleeper.finish(10)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


def test_a_test_that_is_killed_takes_its_hosts_with_it(tmp_path: Path) -> None:
    """The first process of a host waits for the end of a pipe that only the test holds."""
    script = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom tests.hosts import Hosts\n"
        "hosts = Hosts(Path(sys.argv[1]))\nprint(hosts.add().pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    if os.geteuid() != 0:
        pytest.skip("hosts need root")
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, cwd=root, check=False
    )
    if not done.stdout:
        pytest.skip(done.stderr.splitlines()[-1])
    deadline = time.monotonic() + 10
    while Path(f"/proc/{int(done.stdout)}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{int(done.stdout)}").exists()
