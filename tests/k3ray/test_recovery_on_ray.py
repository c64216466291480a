"""Processes of real actors killed and stopped: the same bits, within a bound of time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from k3ray.cluster.actor_calls import ActorId
from k3ray.cluster.actor_chain import ActorChain
from k3ray.cluster.plan import make_plan
from k3ray.cluster.ray_runtime import RaySettings, ray_runtime
from k3ray.cluster.recovering_chain import RecoveringChain
from k3ray.cluster.recovery_plan import RecoverySettings
from k3ray.driver import Driver
from k3ray.proof import logits_hash, trace
from k3ray.workers.in_process import start_in_process
from k3ray.workers.loading import CheckpointSpec
from k3ray.workers.model.config import read_config
from tests.ray_faults import CHUNK, GEN, PROMPT, FaultyActors, RayFault, cases

pytestmark = pytest.mark.ray
SETTINGS = RecoverySettings(snapshot_every=3, silent_s=2.0)
STAGE_0, STAGE_1, SHARD = ActorId("stage", 0), ActorId("stage", 1), ActorId("shard", 1)
CASES = [
    *((STAGE_1, name) for name in ("prefill", "fifth decode", "replay", "snapshot", "first decode, and again")),
    *((STAGE_0, name) for name in ("prefill", "last decode", "hung at first decode")),
    *((SHARD, name) for name in ("prefill", "first decode", "replay", "hung at first decode, and again")),
]


@pytest.fixture(scope="module")
def spec(k3b_dir: Path) -> CheckpointSpec:
    return CheckpointSpec(k3b_dir, None, read_config(k3b_dir).num_hidden_layers)


@pytest.fixture(scope="module")
def expected(spec: CheckpointSpec) -> str:
    alone = make_plan(spec, 1, 0, 1, ())
    return hash_on(Driver(start_in_process(alone.stages, alone.shards)))


@pytest.fixture(scope="module")
def chain(spec: CheckpointSpec) -> Iterator[ActorChain]:
    with started(spec) as found:
        yield found


@contextmanager
def started(spec: CheckpointSpec) -> Iterator[ActorChain]:
    plan = make_plan(spec, 2, 2, 2, ())
    with ray_runtime(RaySettings("local", workers=plan.num_processes)) as runtime:
        found = ActorChain(plan, runtime.actor_options)
        try:
            found.load()
            yield found
        finally:
            found.stop()


def hash_on(driver: Driver) -> str:
    return logits_hash(trace(driver, PROMPT, GEN)[1])


@pytest.mark.parametrize(("victim", "case"), CASES, ids=[f"{victim}-{case}" for victim, case in CASES])
def test_the_same_bits(
    chain: ActorChain, expected: str, victim: ActorId, case: str, capfd: pytest.CaptureFixture[str]
) -> None:
    faults = cases(victim)[case]
    check(chain, faults, expected)
    assert capfd.readouterr() == ("", "")  # Ray tells of a dead worker on standard output, where the text goes


def test_two_at_once(chain: ActorChain, expected: str) -> None:
    check(chain, [RayFault(STAGE_0, "apply", 6, victim) for victim in (STAGE_0, STAGE_1, SHARD)], expected)


def check(chain: ActorChain, faults: list[RayFault], expected: str) -> None:
    actors, began = FaultyActors(chain, faults), time.monotonic()
    recovering = RecoveringChain(actors, SETTINGS)
    try:
        assert hash_on(Driver(recovering, CHUNK)) == expected
    finally:
        recovering.close_sequence(0)  # a failure must not spoil the next case
    assert time.monotonic() - began < 60
    assert actors.signals == len(faults)
    replaced = {name for recovery in recovering.recoveries for name in recovery.lost}
    assert replaced == {str(fault.victim) for fault in faults}
