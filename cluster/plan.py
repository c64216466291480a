"""Which process gets which part of the model and which cores: a pure function of the model, the wishes and the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from k3ray.workers.failure import Failure
from k3ray.workers.message_counts import FarEnds
from k3ray.workers.specs import CheckpointSpec, ShardSpec, StageSpec, TapeSpec

MAX_SHARDS = 256
MAX_THREADS = 4096


class PlanFailure(Failure):
    """Wishes that no placement can meet."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """A placement: the stages in order and the expert shards (none: experts live inside the stages)."""

    stages: tuple[StageSpec, ...]
    shards: tuple[ShardSpec, ...]

    @property
    def actors(self) -> tuple[StageSpec | ShardSpec, ...]:
        """All of them, the stages first."""
        return (*self.stages, *self.shards)

    @property
    def num_processes(self) -> int:
        """How many actors the plan starts."""
        return len(self.stages) + len(self.shards)


def make_plan(checkpoint: CheckpointSpec, num_stages: int, num_shards: int, threads: int, cores: Sequence[int]) -> Plan:
    """Cut the layers into num_stages runs of nearly equal length and deal the threads out over all actors.

    threads: of the whole host, shared out so that no core is promised twice while there is one for everybody; an
    actor has at least one. Raises PlanFailure.
    """
    layers = checkpoint.num_layers
    if not 1 <= num_stages <= layers:
        raise PlanFailure(f"--stages: found {num_stages}, expected 1 to {layers}: a stage holds at least one layer")
    if not 0 <= num_shards <= MAX_SHARDS:
        raise PlanFailure(f"--expert-shards: found {num_shards}, expected 0 to {MAX_SHARDS}")
    if not 1 <= threads <= MAX_THREADS:
        raise PlanFailure(f"--threads: found {threads}, expected 1 to {MAX_THREADS}")
    shares = share_threads(threads, num_stages + num_shards)
    cores_of = share_cores(shares, cores)
    cuts = [layers * stage // num_stages for stage in range(num_stages + 1)]
    stages = tuple(
        StageSpec(checkpoint, cuts[stage], cuts[stage + 1], shares[stage], cores_of[stage])
        for stage in range(num_stages)
    )
    shards = tuple(
        ShardSpec(checkpoint, shard, num_shards, shares[num_stages + shard], cores_of[num_stages + shard])
        for shard in range(num_shards)
    )
    return Plan(stages, shards)


def with_memory(plan: Plan, stages: Sequence[tuple[TapeSpec | None, int]], shard_slots: Sequence[int]) -> Plan:
    """Return the plan with each stage's tape and expert slots, and each shard's slots."""
    return Plan(
        tuple(
            replace(stage, tape=tape, cache_slots=slots)
            for stage, (tape, slots) in zip(plan.stages, stages, strict=True)
        ),
        tuple(replace(shard, cache_slots=slots) for shard, slots in zip(plan.shards, shard_slots, strict=True)),
    )


def with_spec(plan: Plan, number: int, spec: StageSpec | ShardSpec) -> Plan:
    """Return the plan with one actor's spec replaced by one for the same layers, or for the same experts."""
    if isinstance(spec, StageSpec):
        old = plan.stages[number]
        assert (old.first, old.stop, old.experts) == (spec.first, spec.stop, spec.experts), "another part of the model"
        return replace(plan, stages=(*plan.stages[:number], spec, *plan.stages[number + 1 :]))
    before = plan.shards[number]
    assert (before.shard, before.num_shards, before.experts) == (spec.shard, spec.num_shards, spec.experts)
    return replace(plan, shards=(*plan.shards[:number], spec, *plan.shards[number + 1 :]))


def far_ends(plan: Plan, stage: int, driver_node: str) -> FarEnds:
    """Return which of those that a stage exchanges messages with are on other nodes; without nodes, none is."""
    own = plan.stages[stage].node_id
    if own is None:
        return FarEnds(shards=(False,) * len(plan.shards))
    following = plan.stages[stage + 1 : stage + 2]
    return FarEnds(
        own != driver_node,
        any(one.node_id != own for one in following),
        tuple(shard.node_id != own for shard in plan.shards),
    )


def share_threads(threads: int, actors: int) -> list[int]:
    """Return each actor's threads: their sum is `threads` when there are enough, else one each."""
    return [max(1, threads // actors + (actor < threads % actors)) for actor in range(actors)]


def share_cores(shares: Sequence[int], cores: Sequence[int]) -> list[tuple[int, ...]]:
    """Return each actor's cores, in turn around the host's; with more threads than cores some are shared."""
    found, taken = [], 0
    for share in shares:
        found.append(tuple(cores[(taken + index) % len(cores)] for index in range(share)) if cores else ())
        taken += share
    return found
