"""A running cluster of Ray: found, joined and left as it was, or refused with the reason."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ray = pytest.importorskip("ray")

from k3ray.cluster import ray_directory, ray_join  # noqa: E402
from k3ray.cluster.ray_driver import RayFailure  # noqa: E402
from tests.ray_places import LIMIT_S, MIB, Place, driver, make_place  # noqa: E402


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
