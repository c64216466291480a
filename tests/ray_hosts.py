"""A Ray cluster over hosts made for tests: started as a user starts one, with Ray's tokens on."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from k3ray.kernels.compile import cache_directory
from tests.hosts import Host, Hosts, Inside

PROGRAMS = Path(sys.executable).parent  # not resolved: the environment's folder, with ray and k3ray in it
ROOT = Path(__file__).resolve().parents[1]  # hosts run this copy of the project, wherever it was installed from
PORT = 6379
STORE_BYTES = 80_000_000
LEAN = (
    *("--num-cpus=2", "--num-gpus=0", f"--object-store-memory={STORE_BYTES}", "--temp-dir=/tmp/ray"),
    *("--disable-usage-stats", "--include-log-monitor=false", "--log-style=record"),
)
START_S = 90.0
LEAVE_S = 20.0


class RayHosts(Hosts):
    """Hosts, the first of which is the head of a Ray cluster."""

    def __init__(
        self,
        folder: Path,
        count: int,
        settings: Mapping[str, str] | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        """Make `count` hosts and start Ray on them.

        settings: Ray's own, RAY_..., of every daemon. memory_bytes: what Ray may promise on each host.
        """
        kernels = cache_directory()
        super().__init__(folder, [] if kernels is None else [kernels.parent])
        self.settings = dict(settings or {})
        self._options = [*LEAN, *([] if memory_bytes is None else [f"--memory={memory_bytes}"])]
        try:
            self.start_ray(self.add())
            started = [self.begin_join(self.add()) for _ in range(count - 1)]
            for one in started:
                _succeeded(one.finish(START_S))
        except BaseException:
            self.close()
            raise

    @property
    def head(self) -> Host:
        """The host that everything else has joined."""
        return self.hosts[0]

    @property
    def ray_address(self) -> str:
        """What others give to --address and RAY_ADDRESS."""
        return f"{self.head.address}:{PORT}"

    def start_ray(self, host: Host) -> None:
        """`ray start --head` with a token that it makes itself."""
        _succeeded(self.run(host, [str(PROGRAMS / "ray"), "get-auth-token", "--generate"], self.environment()))
        command = ["start", "--head", f"--port={PORT}", "--include-dashboard=false", *self._options]
        _succeeded(self._ray(host, command).finish(START_S))

    def join_ray(self, host: Host, environment: Mapping[str, str] | None = None) -> None:
        """`ray start --address` with the head's token, copied as the manual says."""
        _succeeded(self.begin_join(host, environment).finish(START_S))

    def begin_join(self, host: Host, environment: Mapping[str, str] | None = None) -> Inside:
        """See join_ray; does not wait."""
        target = host.home / ".ray"
        target.mkdir(exist_ok=True)
        shutil.copy(self.head.home / ".ray" / "auth_token", target / "auth_token")
        return self._ray(host, ["start", f"--address={self.ray_address}", *self._options], environment)

    def leave_ray(self, host: Host) -> None:
        """Take a host out of the cluster in order, as `ray stop` there would, and end it."""
        (raylet,) = (pid for pid, line in self.processes(host).items() if "/raylet/raylet " in line)
        self.run(host, ["kill", "-TERM", str(raylet)])
        deadline = time.monotonic() + LEAVE_S
        while raylet in self.processes(host) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.kill(host)

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """What commands in the hosts see: no compiled kernel is compiled again, and Ray asks for tokens."""
        kernels = cache_directory()
        shared = {} if kernels is None else {"NUMBA_CACHE_DIR": str(kernels.parent)}
        base = {
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "token",
            "RAY_memory_monitor_refresh_ms": "0",
            **self.settings,
        }
        return {**base, **shared, **(more or {})}

    def begin_k3ray(self, arguments: Sequence[str], host: Host | None = None, **environment: str) -> Inside:
        """`k3ray ...` on the head or another host, in the cluster."""
        place = host or self.head
        variables = self.environment({"RAY_ADDRESS": self.ray_address, "COLUMNS": "200", **environment})
        return self.start(place, [str(PROGRAMS / "k3ray"), *arguments], variables)

    def k3ray(
        self, arguments: Sequence[str], host: Host | None = None, timeout_s: float = 60.0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """See begin_k3ray; runs it to its end."""
        return self.begin_k3ray(arguments, host, **environment).finish(timeout_s)

    def _ray(self, host: Host, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Inside:
        command = [str(PROGRAMS / "ray"), *arguments, f"--node-ip-address={host.address}"]
        return self.start(host, command, self.environment(environment))


class Running:
    """A run of k3ray whose text and messages are read as they come."""

    def __init__(self, inside: Inside) -> None:
        self._inside = inside
        self._texts: dict[str, list[str]] = {"out": [], "err": []}
        self._changed = threading.Condition()
        pipes = {"out": inside.process.stdout, "err": inside.process.stderr}
        self._readers = [
            threading.Thread(target=self._read, args=(name, pipe), daemon=True) for name, pipe in pipes.items()
        ]
        for reader in self._readers:
            reader.start()

    def await_text(self, characters: int) -> None:
        """Wait until so much has been generated; AssertionError with its messages where it ends before."""
        self._await(lambda: len(self.out) >= characters)

    def await_message(self, text: str, times: int = 1) -> None:
        """Wait until it has said something so often; see await_text."""
        self._await(lambda: self.err.count(text) >= times)

    @property
    def out(self) -> str:
        """The generated text so far."""
        return "".join(self._texts["out"])

    @property
    def err(self) -> str:
        """The messages so far."""
        return "".join(self._texts["err"])

    def signal(self, number: int) -> None:
        """See Inside.signal."""
        self._inside.signal(number)

    def finish(self, timeout_s: float = START_S) -> subprocess.CompletedProcess[str]:
        """Wait for the end; AssertionError with its messages after killing it otherwise."""
        process = self._inside.process
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            raise AssertionError(f"it did not end within {timeout_s:g} s:\n{self.err}") from None
        finally:
            for reader in self._readers:
                reader.join()
        return subprocess.CompletedProcess(process.args, process.returncode, self.out, self.err)

    def _await(self, met: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: met() or self._inside.process.poll() is not None, START_S)
            assert met(), self.err

    def _read(self, name: str, pipe: IO[str]) -> None:
        with pipe:
            while piece := pipe.read(1):
                with self._changed:
                    self._texts[name].append(piece)
                    self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()


def _succeeded(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode:
        raise RuntimeError(f"{done.args[-1]}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
