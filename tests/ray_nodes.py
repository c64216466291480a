"""A Ray cluster of several raylets on this machine, as unequal as a test wants them, with Ray's tokens on.

The first one has this machine's outer address, the others 127.0.0.2 and so on. Every process carries a mark in its
environment, by which all are found and ended.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from k3ray.cluster import ray_directory
from k3ray.kernels.compile import cache_directory

MARK = "K3RAY_TEST_MARK"
PROGRAMS = Path(sys.executable).parent  # not resolved: the environment's folder, with ray and k3ray in it
STORE_BYTES = 80_000_000
LIMIT_S = 150.0


@dataclass(slots=True)
class RayNodes:
    """The cluster. folder: short, for Ray's sockets. addresses: of the nodes, as k3ray shows them."""

    folder: Path
    port: int
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    addresses: list[str] = field(default_factory=list)

    def add(self, memory_bytes: int) -> str:
        """Start another raylet, which gives so much memory to actors; returns its address."""
        number = len(self.addresses) + 1
        home = self._home(number)
        (home / ".ray").mkdir(parents=True)
        (home / ".ray" / "auth_token").write_text("cd" * 32)
        address = f"127.0.0.{number}"
        where = ["--head", f"--port={self.port}"] if number == 1 else [f"--address=127.0.0.1:{self.port}"]
        command = [
            str(PROGRAMS / "ray"), "start", *where, f"--node-ip-address={address}", "--num-cpus=2", "--num-gpus=0",
            f"--temp-dir={self.folder / str(number)}", f"--memory={memory_bytes}",
            f"--object-store-memory={STORE_BYTES}", "--disable-usage-stats", "--include-log-monitor=false",
            *(["--include-dashboard=false"] if number == 1 else []),
        ]  # fmt: skip
        done = subprocess.run(
            command, env=self.environment(number), capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
        self.addresses.append(_outer_address() if number == 1 else address)
        return self.addresses[-1]

    def environment(self, number: int = 1) -> dict[str, str]:
        """What the processes of a node see: nothing of the tester's Ray, and no compiled kernel is compiled again."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "K3_", "OMP_"))}
        kernels = cache_directory()
        shared = {} if kernels is None else {"NUMBA_CACHE_DIR": str(kernels.parent)}
        own = {"HOME": str(self._home(number)), MARK: self.mark, "RAY_AUTH_MODE": "token", "COLUMNS": "200"}
        return kept | shared | own | {"RAY_memory_monitor_refresh_ms": "0", "RAY_ADDRESS": f"127.0.0.1:{self.port}"}

    def k3ray(self, arguments: Sequence[str | Path], timeout_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
        """`k3ray ...` on the first node, to its end."""
        command = [str(PROGRAMS / "k3ray"), *map(str, arguments)]
        environment = self.environment()
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=self.folder
        )

    def begin_k3ray(self, arguments: Sequence[str | Path]) -> subprocess.Popen[str]:
        """The same, going on."""
        command = [str(PROGRAMS / "k3ray"), *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, env=self.environment(), text=True, cwd=self.folder, **pipes)  # type: ignore[call-overload,no-any-return]

    def kill_node(self, number: int) -> None:
        """End a node and everything on it, by its number from 1."""
        home = f"HOME={self._home(number)}"
        ray_directory.kill_marked(home)

    def _home(self, number: int) -> Path:
        return self.folder / f"home{number}"


@contextmanager
def ray_nodes(memories: Sequence[int]) -> Iterator[RayNodes]:
    """A cluster with a node for each number of bytes."""
    folder = Path(tempfile.mkdtemp(prefix="k3n-", dir="/tmp"))
    nodes = RayNodes(folder, _free_port())
    try:
        for memory_bytes in memories:
            nodes.add(memory_bytes)
        yield nodes
    finally:
        ray_directory.kill_marked(f"{MARK}={nodes.mark}")
        shutil.rmtree(folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _outer_address() -> str:
    """What Ray makes of 127.0.0.1."""
    import ray

    return str(ray.util.get_node_ip_address())
