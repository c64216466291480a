"""A private Ray for one run: what it starts, and how it ends, each way in which a process can end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from k3ray.cluster import ray_directory, ray_join  # noqa: E402
from k3ray.cluster.processes import ProcessMemory  # noqa: E402
from k3ray.cluster.ray_driver import RayFailure  # noqa: E402
from k3ray.cluster.ray_runtime import RayRuntime, RaySettings, ray_runtime  # noqa: E402
from tests.ray_places import LIMIT_S, Place, driver  # noqa: E402


@pytest.fixture(scope="module")
def runtime() -> Iterator[RayRuntime]:
    with ray_runtime(RaySettings(address="local", workers=2)) as running:
        yield running


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
