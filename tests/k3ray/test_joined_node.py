"""A joined cluster: Ray is told all that a run takes, the driver too, so that a second one does not take it again."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.ray_nodes import PROGRAMS, RayNodes, ray_nodes

pytestmark = pytest.mark.ray

MEMORY = 900_000_000  # more than a run and the actors of another take, less than two runs do
LEFT = """
import json, logging, ray
from k3ray.cluster.ray_memory import memory_left
ray.init(log_to_driver=False, logging_level=logging.CRITICAL)
address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
print(json.dumps({address[node]: left for node, left in memory_left().items()}))
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_nodes([MEMORY]) as started:
        yield started


@contextmanager
def running(nodes: RayNodes, folder: Path, out: Path, ending: signal.Signals) -> Iterator[None]:
    """While a run generates, which ends by a signal."""
    asked = ["generate", folder, "--ids", "3", "--ignore-eos", "--gen", "3000", "--out", out]
    run = nodes.begin_k3ray(asked)
    try:
        assert run.stdout is not None and run.stdout.read(1)  # it generates
        yield
    finally:
        run.send_signal(ending)
        _, said = run.communicate(timeout=60)
        assert "Traceback" not in said, said


def left_on(nodes: RayNodes) -> list[int]:
    """What Ray still gives on each node."""
    command = [PROGRAMS / "python", "-c", LEFT]
    environment = nodes.environment()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return [found[address] for address in nodes.addresses]


def all_comes_back(nodes: RayNodes) -> bool:
    """Whether Ray soon has all memory to give again: it ends a run's job after the run's own end."""
    return any(left_on(nodes) == [MEMORY] * len(nodes.addresses) for _ in range(5))


def planned_bytes(placement: dict[str, Any]) -> list[int]:
    """Of each node, in the plan's words: what is there once, and its actors."""
    actors = [*placement["stages"], *placement["shards"]]
    return [
        sum(node["parts"].values())
        + sum(sum(actor["budget"]["parts"].values()) for actor in actors if actor["node"] == number)
        for number, node in enumerate(placement["nodes"])
    ]


def test_two_runs_on_one_node_do_not_take_the_same_memory(nodes: RayNodes, k3b_dir: Path, tmp_path: Path) -> None:
    """The actors of both would fit."""
    with running(nodes, k3b_dir, tmp_path / "run.json", signal.SIGINT):
        left = left_on(nodes)
        second = nodes.k3ray(["generate", k3b_dir, "--ids", "3", "--gen", "1"])
    assert second.returncode and "Ray: its --memory, less what runs hold" in second.stderr, second.stderr
    assert "Traceback" not in second.stderr
    planned = json.loads((tmp_path / "run.json").read_text())["planned_memory_bytes"]
    assert left == [MEMORY - planned] and all_comes_back(nodes)


@pytest.mark.slow
def test_what_is_once_on_every_node_is_held_there(nodes: RayNodes, k3b_dir: Path, tmp_path: Path) -> None:
    """Also by a run that is killed, which could give nothing back itself."""
    nodes.add(MEMORY)
    plan = nodes.k3ray(["plan", k3b_dir, "--positions", "3001", "--json"])
    with running(nodes, k3b_dir, tmp_path / "run.json", signal.SIGKILL):
        left = left_on(nodes)
    assert left == [MEMORY - planned for planned in planned_bytes(json.loads(plan.stdout)["placement"])]
    assert all_comes_back(nodes)
