"""Actors that die or hang at every kind of moment, in one process: the same bits, and only what was lost again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from k3ray.cluster.actor_calls import ActorId, ActorLost
from k3ray.cluster.plan import make_plan
from k3ray.cluster.recovering_chain import RecoveringChain
from k3ray.cluster.recovery_plan import RecoverySettings
from k3ray.driver import Driver
from k3ray.proof import logits_hash, trace
from k3ray.workers.in_process import start_in_process
from k3ray.workers.loading import CheckpointSpec
from k3ray.workers.model.config import read_config
from tests.fake_actors import FakeActors, Fault, How

PROMPT = [84, 197, 179, 385, 423, 346, 143, 141, 51, 271]
COMPANIONS = [[5], [9, 9, 9, 9, 9]]
CHUNK, GEN = 3, 6
PREFILL = 4  # steps of the prompt
SETTINGS = RecoverySettings(
    snapshot_every=0, look_s=0.02, settle_s=0.05, silent_s=0.2, start_s=30.0, shortest_deadline_s=3.0
)
STAGES = [ActorId("stage", number) for number in range(3)]
SHARDS = [ActorId("shard", number) for number in range(2)]


@pytest.fixture(scope="module")
def spec(k3b_dir: Path) -> CheckpointSpec:
    return CheckpointSpec(k3b_dir, None, read_config(k3b_dir).num_hidden_layers)


@pytest.fixture(scope="module")
def expected(spec: CheckpointSpec) -> str:
    alone = make_plan(spec, 1, 0, 1, ())
    return hash_on(Driver(start_in_process(alone.stages, alone.shards)))


def hash_on(driver: Driver) -> str:
    return logits_hash(trace(driver, PROMPT, GEN, COMPANIONS)[1])


Run = Callable[..., tuple[FakeActors, RecoveringChain]]


@pytest.fixture
def run(spec: CheckpointSpec, expected: str) -> Run:
    def run_with(
        faults: list[Fault], settings: RecoverySettings = SETTINGS, shards: int = 2
    ) -> tuple[FakeActors, RecoveringChain]:
        actors = FakeActors(make_plan(spec, 3, shards, 1, ()), faults)
        chain = RecoveringChain(actors, settings)
        assert hash_on(Driver(chain, CHUNK)) == expected
        return actors, chain

    return run_with


def repeated(actors: FakeActors) -> dict[int, int]:
    """How many steps each stage computed more than once."""
    times = Counter(actors.applied)
    found = {stage: sum(count - 1 for (at, _), count in times.items() if at == stage) for stage in range(3)}
    return {stage: count for stage, count in found.items() if count}


def test_nothing_lost_nothing_repeated(run: Run) -> None:
    actors, chain = run([])
    assert not repeated(actors) and not chain.recoveries and len(actors.applied) == 3 * (PREFILL + GEN - 1)


@pytest.mark.parametrize("how", ["dies before", "dies after"])
@pytest.mark.parametrize(
    ("stage", "nth"), [(STAGES[0], 1), (STAGES[1], 3), (STAGES[2], PREFILL + 1), (STAGES[1], PREFILL + GEN - 1)]
)
def test_only_the_lost_stage_computes_again(run: Run, stage: ActorId, nth: int, how: How) -> None:
    actors, chain = run([Fault(stage, "apply", nth, how)])
    again = nth - 1 + (how == "dies after")  # what it had answered, and the step whose answer died with it
    assert repeated(actors) == ({stage.number: again} if again else {})
    (recovery,) = chain.recoveries
    assert recovery.lost == (str(stage),) and recovery.restored == 0
    assert recovery.layer_steps == (nth - 1) * len(actors.layers_of(stage.number))


@pytest.mark.parametrize("how", ["dies before", "dies after", "hangs"])
@pytest.mark.parametrize(("shard", "nth"), [(SHARDS[0], 1), (SHARDS[1], 30)])
def test_a_lost_shard_costs_no_stage_a_step(run: Run, shard: ActorId, nth: int, how: How) -> None:
    actors, chain = run([Fault(shard, "apply", nth, how)])
    assert not repeated(actors)
    assert [recovery.lost for recovery in chain.recoveries] == [(str(shard),)]


@pytest.mark.parametrize("stage", STAGES)
def test_snapshots_bound_what_is_repeated(run: Run, stage: ActorId) -> None:
    settings = RecoverySettings(**{**as_dict(SETTINGS), "snapshot_every": 2})
    actors, chain = run([Fault(stage, "apply", PREFILL + GEN - 1)], settings)
    (recovery,) = chain.recoveries
    assert recovery.restored == 3 and sum(repeated(actors).values()) <= 4
    assert recovery.layer_steps == sum(repeated(actors).values()) * len(actors.layers_of(stage.number))


@pytest.mark.parametrize(
    "faults",
    [
        [Fault(STAGES[1], "apply", 5), Fault(STAGES[1], "apply", 7)],  # again, while it repeats
        [Fault(STAGES[0], "apply", 5), Fault(STAGES[2], "apply", 4)],
        [Fault(STAGES[0], "apply", 3), Fault(STAGES[0], "load", 2)],
        [Fault(STAGES[1], "apply", 3), Fault(SHARDS[1], "apply", 30)],
        [Fault(SHARDS[0], "apply", 9), Fault(SHARDS[1], "apply", 9)],
        [Fault(SHARDS[0], "apply", 9), Fault(SHARDS[0], "load", 2), Fault(SHARDS[0], "apply", 10)],
        [Fault(STAGES[2], "open_sequence", 2)],
        [Fault(STAGES[0], "close_sequence", 1), Fault(STAGES[2], "close_sequence", 3)],
        [Fault(STAGES[1], "apply", 4, "hangs"), Fault(STAGES[0], "apply", 6, "hangs")],
    ],
)
def test_several_losses(run: Run, faults: list[Fault]) -> None:
    actors, _ = run(faults)
    assert set(repeated(actors)) <= {fault.actor.number for fault in faults if fault.actor.kind == "stage"}


@pytest.mark.parametrize("how", ["dies before", "dies after", "hangs"])
@pytest.mark.parametrize("method", ["snapshot", "restore_piece", "finish_restore"])
def test_losses_in_a_snapshot_and_while_it_is_loaded(run: Run, method: str, how: How) -> None:
    settings = RecoverySettings(**{**as_dict(SETTINGS), "snapshot_every": 3})
    faults = [Fault(STAGES[1], method, 2, how), Fault(STAGES[1], "apply", PREFILL + 4)]
    actors, chain = run(faults, settings)
    assert set(repeated(actors)) == {1} and chain.recoveries


def test_a_stage_that_lives_and_never_answers(run: Run) -> None:
    actors, chain = run([Fault(STAGES[1], "apply", 5, "is stuck")], shards=0)
    assert [recovery.lost for recovery in chain.recoveries] == [("stage 1",)] and repeated(actors) == {1: 4}


def test_past_the_bound(run: Run) -> None:
    faults = [Fault(STAGES[1], "apply", nth) for nth in range(1, 30)]
    with pytest.raises(ActorLost, match=r"stage 1 ended or did not answer, and this run was recovered 2 times"):
        run(faults, RecoverySettings(**{**as_dict(SETTINGS), "max_recoveries": 2}))


def as_dict(settings: RecoverySettings) -> dict[str, float]:
    return {name: getattr(settings, name) for name in settings.__slots__}
