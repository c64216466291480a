"""`k3ray generate` over separate hosts: the bits of one process, and nothing disturbed or left behind."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.goldens import read_golden
from tests.hosts import Host
from tests.k3ray.test_hosts_nodes import give_models
from tests.ray_hosts import RayHosts, Running

pytestmark = pytest.mark.ray
LONG = 4000


@pytest.fixture
def unchanged(three_hosts: RayHosts) -> Iterator[RayHosts]:
    """Three hosts on which a test leaves no actor and no shared memory."""
    before = {host.name: three_hosts.shared_memory(host) for host in three_hosts.hosts}
    yield three_hosts
    assert not {host.name: actors for host in three_hosts.hosts if (actors := actors_on(three_hosts, host))}
    assert {host.name: three_hosts.shared_memory(host) for host in three_hosts.hosts} == before


def actors_on(hosts: RayHosts, host: Host, within_s: float = 10.0) -> list[str]:
    """The actors and idle workers that are still on a host after a while."""
    deadline = time.monotonic() + within_s
    while True:
        lines = hosts.processes(host).values()
        left = [line for line in lines if line.startswith("ray::") and not line.endswith("Agent")]
        left = [line for line in left if not line.startswith("ray::IDLE")]  # Ray's own, for the next job
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


def options(k3b_dir: Path, gen: int, *more: str) -> list[str]:
    ids = ",".join(map(str, read_golden(k3b_dir).ids(2)))
    return ["generate", str(k3b_dir), "--ids", ids, "--gen", str(gen), "--ignore-eos", *more]


def begin(hosts: RayHosts, arguments: list[str]) -> Running:
    """A run from whose first tokens on the test goes on."""
    run = Running(hosts.begin_k3ray(arguments))
    run.await_text(4)
    return run


def record(hosts: RayHosts, name: str = "run.json") -> dict[str, Any]:
    return dict(json.loads((hosts.head.folder / name).read_text()))


def greedy(k3b_dir: Path) -> list[int]:
    return list(read_golden(k3b_dir).arrays["p2_greedy"].tolist())


def test_ids_and_logits_are_those_of_one_process(unchanged: RayHosts, k3b_dir: Path) -> None:
    """By the plan that places itself, each host with its own copy; and by a plan file; against one process."""
    hosts = unchanged
    roots = give_models(hosts, k3b_dir)
    arguments = options(k3b_dir, 32)
    arguments[1] = "/tmp/disk-of-host-1"
    alone = hosts.k3ray([*arguments, "--dump-logits", "/tmp/alone", "--stages", "1"], RAY_ADDRESS="local")
    over = hosts.k3ray(
        [*arguments, "--dump-logits", "/tmp/over", "--roots", str(roots), "--out", "/tmp/run.json"], timeout_s=120
    )
    assert (alone.returncode, over.returncode) == (0, 0), alone.stderr + over.stderr
    found = record(hosts)
    assert found["generated_ids"] == greedy(k3b_dir)
    assert [node["name"] for node in found["nodes"]] == ["host-1", "host-2", "host-3"]
    assert all(len(node["actors"]) == 2 for node in found["nodes"]) and found["messages"]["between_nodes_bytes"] > 0
    assert (hosts.head.folder / "over").read_bytes() == (hosts.head.folder / "alone").read_bytes()
    assert over.stdout == alone.stdout


def test_a_host_that_joins_in_the_middle_disturbs_nothing(unchanged: RayHosts, k3b_dir: Path) -> None:
    run = begin(unchanged, options(k3b_dir, 60, "--out", "/tmp/run.json"))
    late = unchanged.add()
    unchanged.join_ray(late)
    done = run.finish()
    unchanged.leave_ray(late)
    assert done.returncode == 0, done.stderr
    found = record(unchanged)
    assert found["generated_ids"][:32] == greedy(k3b_dir)
    assert len(found["generated_ids"]) == 60 and found["recoveries"] == []
    assert [node["name"] for node in found["nodes"]] == ["host-1", "host-2", "host-3"]


def test_a_link_that_is_silent_for_ten_seconds_costs_ten_seconds(unchanged: RayHosts, k3b_dir: Path) -> None:
    """Nothing is taken for dead, nothing is computed again: what was on its way arrives when the link is back."""
    victim = unchanged.hosts[2]
    run = begin(unchanged, options(k3b_dir, 60, "--out", "/tmp/run.json"))
    unchanged.cut(victim)
    before = len(run.out)
    time.sleep(10.0)
    assert len(run.out) - before < 20  # what was under way; it has really been cut
    unchanged.mend(victim)
    done = run.finish()
    assert done.returncode == 0, done.stderr
    found = record(unchanged)
    assert found["recoveries"] == [] and found["generated_ids"][:32] == greedy(k3b_dir)
    assert max(found["step_seconds"]) > 9.0


def test_a_second_run_is_refused_the_memory_of_the_first_and_ctrl_c_ends_that_everywhere(
    unchanged: RayHosts, k3b_dir: Path
) -> None:
    """Ray knows what the first run has been given, so the second one is told, and does not wait in silence."""
    planned = unchanged.k3ray(["plan", str(k3b_dir), "--out", "/tmp/both.json", "--preset", "max"])
    assert planned.returncode == 0, planned.stderr
    first = begin(unchanged, options(k3b_dir, LONG, "--plan", "/tmp/both.json"))
    try:
        second = unchanged.k3ray(options(k3b_dir, 4, "--plan", "/tmp/both.json"), timeout_s=90)
    finally:
        began = time.monotonic()
        first.signal(signal.SIGINT)
        ended = first.finish()
        took_s = time.monotonic() - began
    assert second.returncode == 2 and second.stdout == "", second.stderr
    assert "Traceback" not in second.stderr
    last = second.stderr[second.stderr.index("k3ray: ") :]
    assert "node host-1: the plan takes " in last and " are available there " in last, last
    assert ended.returncode == 130 and took_s < 5.0, ended.stderr  # the first one was not disturbed
    assert "interrupted; nothing is left running" in ended.stderr and "Traceback" not in ended.stderr
