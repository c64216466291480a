"""`k3ray generate` over separate hosts of which some are lost for good: the same bits, on those that remain."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from k3ray.cluster.plan import make_plan
from k3ray.driver import Driver
from k3ray.proof import trace
from k3ray.workers.in_process import start_in_process
from k3ray.workers.loading import CheckpointSpec
from tests.goldens import read_golden
from tests.hosts import NoHosts
from tests.k3ray.test_hosts_generate import actors_on, begin, options, record
from tests.ray_hosts import RayHosts

pytestmark = pytest.mark.ray
GEN = 200


QUICK = {  # Ray takes a minute to notice a silent host: here less, and more than a command takes to start when busy
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1500",
    "RAY_health_check_failure_threshold": "8",
}


@contextmanager
def hosts_to_lose(folder: Path, count: int, settings: Mapping[str, str] | None = None) -> Iterator[RayHosts]:
    try:
        made = RayHosts(folder, count, settings)
    except NoHosts as reason:
        pytest.skip(str(reason))
    with made:
        yield made


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[RayHosts]:
    """Three hosts that a test may lose, with Ray's settings as they come."""
    with hosts_to_lose(tmp_path, 3) as made:
        yield made


def ids_of_one_process(k3b_dir: Path) -> list[int]:
    alone = make_plan(CheckpointSpec(k3b_dir, None, 9), 1, 0, 1, ())
    driver = Driver(start_in_process(alone.stages, alone.shards))
    return list(trace(driver, read_golden(k3b_dir).ids(2), GEN)[0])


def test_a_host_is_killed_and_then_another_is_cut_off_for_good(hosts: RayHosts, k3b_dir: Path) -> None:
    """All of a host's processes at once; then silence, in which no connection is ever closed."""
    arguments = ["--out", "/tmp/run.json", "--snapshot-every", "8", "--max-recoveries", "4"]
    run = begin(hosts, options(k3b_dir, GEN, *arguments))
    second, third = hosts.hosts[1], hosts.hosts[2]
    hosts.kill(third)
    run.await_message("lost and loaded again: ", 2)
    hosts.cut(second)
    done = run.finish(120.0)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "raylet" not in done.stdout + done.stderr
    found = record(hosts)
    assert found["generated_ids"] == ids_of_one_process(k3b_dir)
    moves = [place for recovery in found["recoveries"] for place in recovery["places"]]
    assert all(" -> " in move and not move.endswith(third.name) for move in moves)
    assert {move.split(":")[0] for move in moves if f": {third.name} ->" in move} == {"stage 2", "shard 2"}
    assert all(move.endswith("-> host-1") for move in moves if f": {second.name} ->" in move)
    assert 0 < found["messages"]["between_nodes_bytes"] < found["messages"]["total_bytes"]  # now all are on host-1
    assert not actors_on(hosts, hosts.head)


def test_a_host_without_power_is_left_out_with_the_reason(tmp_path: Path, k3b_dir: Path) -> None:
    with hosts_to_lose(tmp_path, 2, QUICK) as hosts:
        hosts.power_off(hosts.hosts[1])
        done = hosts.k3ray(["nodes", str(k3b_dir), "--json"], timeout_s=110)
    assert done.returncode == 1, done.stderr
    head, gone = json.loads(done.stdout)["nodes"]
    assert head["usable"] and not gone["usable"] and gone["name"] == "host-2"
    assert gone["reasons"] == [
        "left the cluster while it was asked: is it running and reachable? `ray start` there again"
    ]
