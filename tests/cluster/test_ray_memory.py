"""Actors that Ray keeps waiting for memory: said within seconds, never waited for in silence."""

from __future__ import annotations

from typing import Any

import pytest

from k3ray.cluster.actor_calls import ActorLost
from k3ray.cluster.node_survey import RAY_DECIDES, within_ray
from k3ray.cluster.ray_memory import LOOK_S, START_S, MemoryTaken, await_started
from k3ray.cluster.topology import NodeFacts

GB = 10**9
STARTING = {"one": ("shard 0 of 2", "n1", 3 * GB), "two": ("layers 0..4", "n2", 2 * GB)}


class Waiting:
    """First calls of which each look finds as many answered as it is told; each look takes its time."""

    def __init__(self, answered: list[int]) -> None:
        self.answered = answered
        self.now = 0.0
        self.looks = 0

    def wait(self, refs: list[Any], timeout_s: float) -> tuple[list[Any], list[Any]]:
        self.now += timeout_s
        count = self.answered[min(self.looks, len(self.answered) - 1)]
        self.looks += 1
        return refs[:count], refs[count:]


def test_all_start() -> None:
    waiting = Waiting([1, 1])
    await_started(STARTING, left=lambda: {"n1": 9 * GB, "n2": 0}, wait=waiting.wait, clock=lambda: waiting.now)
    assert waiting.looks == 2
    await_started({}, wait=waiting.wait)


def test_memory_that_another_run_holds_is_said_with_its_node() -> None:
    waiting = Waiting([1, 0])
    with pytest.raises(
        MemoryTaken, match=r"layers 0\.\.4 is to have 2\.00 GB on node server-b and Ray has 1\.50 GB"
    ) as found:
        await_started(
            STARTING, {"n2": "server-b"}.__getitem__, lambda: {"n2": 3 * GB // 2}, waiting.wait, lambda: waiting.now
        )
    assert waiting.now == 3 * LOOK_S and found.value.exit_code == 2


def test_one_look_that_finds_too_little_is_not_believed() -> None:
    waiting, left = Waiting([0, 0, 0, 0, 2]), iter([0, 0, 9 * GB, 0, 0, 0])
    await_started(STARTING, left=lambda: {"n1": next(left)}, wait=waiting.wait, clock=lambda: waiting.now)
    assert waiting.looks == 5


def test_what_never_starts_ends() -> None:
    waiting = Waiting([0])
    with pytest.raises(ActorLost, match=r"shard 0 of 2, layers 0\.\.4: not started after"):
        await_started(STARTING, left=dict, wait=waiting.wait, clock=lambda: waiting.now)
    assert START_S < waiting.now <= START_S + 2 * LOOK_S


def test_a_node_has_no_more_than_ray_gives() -> None:
    facts = NodeFacts("n1", "a", available_bytes=5 * GB, decided_by="MemAvailable")
    assert within_ray(facts, 9 * GB) == within_ray(facts, None) == facts
    capped = within_ray(facts, 2 * GB)
    assert (capped.available_bytes, capped.decided_by) == (2 * GB, RAY_DECIDES)
    silent = NodeFacts("n1", "a", problem="did not answer")
    assert within_ray(silent, 0) == silent
