"""Runs with Ray in processes of their own, for tests: each in a place of its own, and nothing may be left of it.

Every process carries a mark in its environment, by which what is left behind is found whoever its parent is.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from k3ray.cluster import ray_directory

MARK = "K3RAY_TEST_MARK"
MIB = 1 << 20
LIMIT_S = 120.0  # a machine that many share may be slow; what hangs is still found


# Starts Ray as {settings}, two actors of which one never returns from its call, says so, then does {then}.
DRIVER = """
import os, sys, time
import numpy, ray
from k3ray.cluster import ray_private, ray_runtime
from k3ray.workers.failure import Failure

class Busy:
    def where(self): return os.getpid(), os.getcwd(), sys.executable
    def size(self, array): return array.nbytes
    def spin(self):
        while True: pass

{before}
try:
    with ray_runtime.ray_runtime(ray_runtime.RaySettings({settings})) as runtime:
        actors = [ray.remote(Busy).options(**runtime.actor_options(0, None, "busy-%d" % i)).remote() for i in range(2)]
        assert ray.get(actors[0].size.remote(numpy.zeros(10 << 20, numpy.uint8))) == 10 << 20
        ray.get([actor.where.remote() for actor in actors])
        running = actors[1].spin.remote()
        print(runtime.describe(), flush=True)
        {then}
except Failure as failure:
    print(failure)
    sys.exit(failure.exit_code)
except KeyboardInterrupt:
    print("interrupted")
except ZeroDivisionError:
    print("divided")
print("end")
"""


@dataclass(frozen=True, slots=True)
class Place:
    """A directory of a test's own, and the environment of its processes."""

    path: Path
    environment: dict[str, str]

    @property
    def mark(self) -> str:
        return f"{MARK}={self.environment[MARK]}"

    def run(self, code: str, **extra: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-W", "error", "-c", code],
            env=self.environment | extra,
            cwd=self.path,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    @contextmanager
    def started(self, code: str) -> Iterator[subprocess.Popen[str]]:
        """A driver in a session of its own that has said its first line."""
        with subprocess.Popen(
            [sys.executable, "-W", "error", "-c", code],
            env=self.environment,
            cwd=self.path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline().startswith("Ray: ")
                yield process
            finally:
                process.kill()

    def left(self, word: str = "") -> list[str]:
        """What still runs, or lies about, and has `word` in its command line or name."""
        found = [str(path) for path in self.path.glob("k3ray-*")]
        for pid in ray_directory.marked(self.mark):
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                found.append(command.replace(b"\0", b" ").decode()[:200].rstrip())
        return [line for line in found if word in line]

    def await_nothing_left(self, word: str = "") -> None:
        deadline = time.monotonic() + LIMIT_S
        while self.left(word):
            assert time.monotonic() < deadline, self.left(word)
            time.sleep(0.05)


def make_place() -> Place:
    """A new one."""
    path = Path(tempfile.mkdtemp(prefix="k3t-", dir="/tmp"))  # pytest's directories are too long for sockets
    (path / "home").mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    places = {"TMPDIR": str(path), "RAY_TMPDIR": str(path), "HOME": str(path / "home")}
    return Place(path, kept | places | {MARK: uuid.uuid4().hex})


def driver(then: str = "pass", settings: str = "'local', 2", before: str = "") -> str:
    """The program of a run with Ray."""
    return DRIVER.format(then=then, settings=settings, before=before)
