"""Ray for one run: what it starts, how it ends (each way a process can end), and how a running cluster is joined.

Every process of a test carries a mark in its environment, by which what is left behind is found whoever its parent is.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from k3ray.cluster import ray_directory, ray_join  # noqa: E402
from k3ray.cluster.processes import ProcessMemory  # noqa: E402
from k3ray.cluster.ray_driver import RayFailure  # noqa: E402
from k3ray.cluster.ray_runtime import RayRuntime, RaySettings, ray_runtime  # noqa: E402

MARK = "K3RAY_TEST_MARK"
MIB = 1 << 20
LIMIT_S = 120.0  # a machine that many share may be slow; what hangs is still found
ROOT = Path(__file__).resolve().parents[2]

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
    path = Path(tempfile.mkdtemp(prefix="k3t-", dir="/tmp"))  # pytest's directories are too long for sockets
    (path / "home").mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    places = {"TMPDIR": str(path), "RAY_TMPDIR": str(path), "HOME": str(path / "home")}
    return Place(path, kept | places | {MARK: uuid.uuid4().hex})


@pytest.fixture
def place() -> Iterator[Place]:
    made = make_place()
    yield made
    try:
        made.await_nothing_left()
    finally:
        shutil.rmtree(made.path)


@pytest.fixture(scope="module")
def runtime() -> Iterator[RayRuntime]:
    with ray_runtime(RaySettings(address="local", workers=2)) as running:
        yield running


def driver(then: str = "pass", settings: str = "'local', 2", before: str = "") -> str:
    return DRIVER.format(then=then, settings=settings, before=before)


class Actor:
    def facts(self) -> dict[str, Any]:
        names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        facts = {"pid": os.getpid(), "nice": os.nice(0), "python": sys.executable}
        return {**facts, **{name: os.environ.get(name) for name in names}}


@pytest.mark.ray
def test_a_private_ray_is_two_daemons_and_the_actors(runtime: RayRuntime) -> None:
    assert runtime.started and runtime.address == ""
    assert runtime.describe() == "Ray: started its own, 200 MB object store in /dev/shm"
    assert sorted(runtime.daemon_pids().values()) == ["gcs_server", "raylet"]
    actors = [ray.remote(Actor).options(**runtime.actor_options(8, 1 << 60, f"a-{i}")).remote() for i in range(3)]
    facts = ray.get([actor.facts.remote() for actor in actors], timeout=LIMIT_S)
    assert len({fact["pid"] for fact in facts}) == 3
    assert all(fact["python"] == sys.executable and fact["OPENBLAS_NUM_THREADS"] == "1" for fact in facts)
    assert {fact["nice"] for fact in facts} == {os.nice(0)}
    found = ProcessMemory({os.getpid(): "driver", **runtime.daemon_pids()}).sample()
    assert found.role_counts["Actor"] == 3
    assert (
        {"driver", "raylet", "gcs_server"}
        <= set(found.role_bytes)
        <= {"driver", "raylet", "gcs_server", "Actor", "idle worker"}
    )


@pytest.mark.ray
def test_a_second_ray_in_one_process_is_refused_and_the_first_goes_on(runtime: RayRuntime) -> None:
    with pytest.raises(RayFailure, match="is connected to Ray already"), ray_runtime(RaySettings("local")):
        pass
    assert ray.get(ray.remote(Actor).options(**runtime.actor_options(0, None, "again")).remote().facts.remote())


@pytest.mark.ray
def test_the_directory_of_a_private_ray_is_closed_to_other_users(runtime: RayRuntime) -> None:
    variables = Path(f"/proc/{next(iter(runtime.daemon_pids()))}/environ").read_bytes().split(b"\0")
    directory = Path(dict(line.decode().partition("=")[::2] for line in variables)[ray_directory.VARIABLE])
    assert (directory / ray_directory.LONGEST_SOCKET).is_socket()
    assert directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.ray
def test_a_private_ray_is_to_be_reached_from_this_machine_only_and_with_its_token_only(runtime: RayRuntime) -> None:
    assert len(os.environ["RAY_AUTH_TOKEN"]) == 64
    port = int(ray.get_runtime_context().gcs_address.rpartition(":")[2])
    outer = ray.util.get_node_ip_address()
    assert outer == "127.0.0.1"
    with pytest.raises(RayFailure, match="refuses the one that was found"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", "00" * 32)
        ray_join.examine(f"[::ffff:127.0.0.1]:{port}")


@pytest.mark.ray
def test_the_object_store_on_the_disk_and_an_exception(place: Place) -> None:
    small = (
        "import functools, pathlib\n"
        "ray_private.private_settings = functools.partial("
        "ray_private.private_settings, shared_memory=pathlib.Path('/nowhere'))"
    )
    done = place.run(driver("1 / 0", before=small))
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"Ray: started its own, 200 MB object store in {place.path}/k3ray-")
    assert lines[1:] == ["divided", "end"]
    assert place.left() == []
    assert list((place.path / "home").iterdir()) == []


@pytest.mark.ray
def test_where_the_private_parts_of_ray_have_changed_it_is_started_the_public_way(place: Place) -> None:
    changed = "from k3ray.cluster import ray_head\nray_head.AGENT_OPTIONS = ('--no_such_option',)"
    done = place.run(driver(before=changed))
    assert done.stderr == ""
    assert "started slowly, with all its helpers: this version of Ray has no option --no_such_option" in done.stdout
    assert done.stdout.endswith("\nend\n")
    assert place.left() == []


@pytest.mark.ray
@pytest.mark.parametrize(
    ("number", "whole_group", "last_line", "code"),
    [
        (signal.SIGINT, True, "end\n", 0),  # Ctrl-C at a terminal goes to every process of the group
        (signal.SIGTERM, False, "", 143),
        (signal.SIGHUP, True, "", 129),
        (signal.SIGKILL, False, "", -9),
    ],
)
def test_a_signal(place: Place, number: signal.Signals, whole_group: bool, last_line: str, code: int) -> None:
    with place.started(driver("time.sleep(600)")) as process:
        if whole_group:
            os.killpg(process.pid, number)
        else:
            os.kill(process.pid, number)
        output, errors = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, errors) == (code, "")
    assert output.endswith(last_line)
    if number != signal.SIGKILL:
        assert place.left() == []
    place.await_nothing_left()


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """A cluster as `ray start --head` makes it where a token exists: it asks for that token."""

    place: Place
    address: str
    port: int


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    made = make_place()
    (made.path / "home" / ".ray").mkdir()
    (made.path / "home" / ".ray" / "auth_token").write_text("ab" * 32)
    port = free_port()
    options = {
        "port": port,
        "dashboard-agent-listen-port": free_port(),
        "min-worker-port": 0,
        "max-worker-port": 0,
        "num-cpus": 2,
        "object-store-memory": 80 * MIB,
        "include-dashboard": "false",
    }
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--disable-usage-stats"]
    command += [f"--{name}={value}" for name, value in options.items()]
    subprocess.run(command, env=made.environment, check=True, capture_output=True, timeout=LIMIT_S)
    try:
        yield RunningCluster(made, (made.path / "ray" / "ray_current_cluster").read_text(), port)
    finally:
        ray_directory.kill_marked(made.mark)
        assert made.left() == []
        shutil.rmtree(made.path)


@pytest.fixture
def admitted(cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has the cluster's token, and not that of the private Ray of this module."""
    monkeypatch.setenv("HOME", cluster.place.environment["HOME"])
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)


@pytest.mark.ray
@pytest.mark.usefixtures("admitted")
def test_a_cluster_that_is_announced_on_this_machine_is_joined_and_left_as_it_was(cluster: RunningCluster) -> None:
    done = cluster.place.run(driver(settings="None, 2"))
    assert done.stderr == ""
    assert done.stdout == f"Ray: joined the cluster at {cluster.address}, 1 node\nend\n"
    cluster.place.await_nothing_left("ray::Busy")
    assert ray_join.examine(cluster.address) == ray_join.Cluster(cluster.address, "token", 1)


@pytest.mark.ray
def test_actors_in_a_joined_cluster_end_with_a_killed_driver(cluster: RunningCluster) -> None:
    with cluster.place.started(driver("time.sleep(600)", settings=f"'localhost:{cluster.port}', 2")) as process:
        assert len(cluster.place.left("ray::Busy")) == 2
        process.kill()
        _, errors = process.communicate(timeout=LIMIT_S)
    assert errors == ""
    cluster.place.await_nothing_left("ray::Busy")


@pytest.mark.ray
@pytest.mark.usefixtures("admitted")
def test_an_actor_of_a_joined_cluster_is_bound_to_the_drivers_node(cluster: RunningCluster) -> None:
    """A plan is for one host: an actor that Ray put on another would not find the checkpoint."""
    done = cluster.place.run(
        "import ray\n"
        "from k3ray.cluster.ray_runtime import RaySettings, ray_runtime\n"
        f"with ray_runtime(RaySettings('localhost:{cluster.port}', 2)) as runtime:\n"
        "    strategy = runtime.actor_options(0, None, 'one')['scheduling_strategy']\n"
        "    print(strategy.node_id == ray.get_runtime_context().get_node_id(), strategy.soft)\n"
    )
    assert done.stdout == "True False\n", done.stderr


@pytest.mark.ray
@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [("RAY_AUTH_TOKEN", "cd" * 32, "refuses the one that was found"), ("HOME", "/nowhere", "none was found")],
)
def test_a_cluster_whose_token_we_do_not_have(cluster: RunningCluster, variable: str, value: str, message: str) -> None:
    done = cluster.place.run(driver(settings=f"'localhost:{cluster.port}', 2"), **{variable: value})
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout.startswith(f"the Ray cluster at localhost:{cluster.port} asks for its token and {message}: put ")
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.ray
@pytest.mark.usefixtures("admitted")
def test_a_cluster_of_another_version(cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_join.ray, "__version__", "2.0.0")
    with pytest.raises(RayFailure, match=r"runs Ray \S+ on Python \S+, and this process Ray 2\.0\.0 on Python"):
        ray_join.examine(cluster.address)


@pytest.mark.ray
def test_a_port_that_is_open_and_silent() -> None:
    with socket.socket() as listener:
        listener.bind((ray.util.get_node_ip_address(), 0))
        listener.listen()
        with pytest.raises(RayFailure, match="is no Ray cluster"):
            ray_join.examine(":".join(map(str, listener.getsockname())))
