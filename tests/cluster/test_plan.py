"""Every layer and every expert has exactly one place, and threads are dealt out once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3ray.cluster.plan import Plan, PlanFailure, far_ends, make_plan
from k3ray.workers.expert_owners import shard_of
from k3ray.workers.loading import CheckpointSpec
from k3ray.workers.message_counts import FarEnds


@given(st.integers(1, 120), st.integers(1, 120), st.integers(0, 20), st.integers(1, 300), st.integers(0, 64))
def test_every_layer_once_and_no_thread_twice(layers: int, stages: int, shards: int, threads: int, cores: int) -> None:
    spec = CheckpointSpec(Path("model"), None, layers)
    if stages > layers:
        with pytest.raises(PlanFailure, match="--stages"):
            make_plan(spec, stages, shards, threads, range(cores))
        return
    plan = make_plan(spec, stages, shards, threads, range(cores))
    assert [layer for stage in plan.stages for layer in range(stage.first, stage.stop)] == list(range(layers))
    assert all(stage.stop > stage.first for stage in plan.stages)
    lengths = [stage.stop - stage.first for stage in plan.stages]
    assert max(lengths) - min(lengths) <= 1
    actors = [*plan.stages, *plan.shards]
    assert sum(actor.threads for actor in actors) == max(threads, len(actors))
    if cores:
        assert all(len(actor.cores) == actor.threads for actor in actors)
        promised = [core for actor in actors for core in actor.cores]
        assert len(set(promised)) == min(cores, len(promised))
    assert make_plan(spec, stages, shards, threads, range(cores)) == plan


@given(st.integers(1, 1000), st.integers(1, 30))
def test_every_expert_has_one_shard(experts: int, shards: int) -> None:
    counts = [sum(shard_of(expert, shards) == shard for expert in range(experts)) for shard in range(shards)]
    assert sum(counts) == experts and max(counts) - min(counts) <= 1


@pytest.mark.parametrize(("stages", "shards", "threads", "option"), [
    (0, 0, 1, "--stages"), (6, 0, 1, "--stages"), (1, -1, 1, "--expert-shards"), (1, 0, 0, "--threads"),
])  # fmt: skip
def test_wishes_that_cannot_be_met(stages: int, shards: int, threads: int, option: str) -> None:
    with pytest.raises(PlanFailure, match=f"{option}: found"):
        make_plan(CheckpointSpec(Path("model"), None, 5), stages, shards, threads, ())


def on_nodes(stages: list[str | None], shards: list[str | None]) -> Plan:
    plan = make_plan(CheckpointSpec(Path("model"), None, len(stages)), len(stages), len(shards), 8, range(8))
    return Plan(
        tuple(replace(stage, node_id=node) for stage, node in zip(plan.stages, stages, strict=True)),
        tuple(replace(shard, node_id=node) for shard, node in zip(plan.shards, shards, strict=True)),
    )


def test_who_is_on_another_node_than_a_stage() -> None:
    plan = on_nodes(["a", "a", "b"], ["a", "b", "c"])
    assert far_ends(plan, 0, "a") == FarEnds(False, False, (False, True, True))
    assert far_ends(plan, 1, "b") == FarEnds(True, True, (False, True, True))
    assert far_ends(plan, 2, "a") == FarEnds(True, False, (True, False, True))
    assert far_ends(on_nodes([None, None], [None]), 0, "a") == FarEnds(False, False, (False,))
