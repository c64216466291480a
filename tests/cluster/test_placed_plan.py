"""From a placement and nodes to what actors are told; what the nodes lack is refused before anything starts."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3ray.cluster.cluster_file import described_node, described_speeds
from k3ray.cluster.placed_budget import PlacedBudget
from k3ray.cluster.placed_plan import PlacementRefused, check_nodes, nodes_of, placed_plan
from k3ray.cluster.placement import Placement, place
from k3ray.cluster.plan import with_spec
from k3ray.cluster.seats import ClusterWishes, PlacementFailure
from k3ray.cluster.topology import ModelCopy, NodeFacts, TapeCopy, Verdict
from k3ray.workers.expert_owners import ExpertOwners
from k3ray.workers.model.config import read_config
from k3ray.workers.specs import CheckpointSpec, part_name
from k3ray.workers.tape.layout import plan_layout

SMALL = read_config(Path(__file__).parents[1] / "data" / "k3b")
CHUNK = 32 << 10
LAYOUT = plan_layout(SMALL, CHUNK)
MB = 10**6
LAYERS = tuple(range(9))
SPEC = CheckpointSpec(Path("/driver/model"), Path("/driver/config.json"), 9, config=SMALL)


def node(name: str, memory_bytes: int = 900 * MB, *, driver: bool = False, numa: int = 1, **more: Any) -> NodeFacts:
    made = described_node(name, memory_bytes, 4, described_speeds(50, 2), LAYERS, driver=driver, numa=numa)
    folders = (ModelCopy(f"/{name}/m", "f", "d", True, LAYERS, True),)
    facts = replace(made, node_id=f"id-{name}", address=f"10.0.0.{name[-1]}", models=folders,
                    tapes=(TapeCopy(f"/{name}/t", "p", "", CHUNK),))  # fmt: skip
    return replace(facts, **more)


def nodes(**more: Any) -> list[NodeFacts]:
    """Unequal ones; the driver on the first. more: of the last one."""
    return [node("a1", driver=True), node("b2", 2000 * MB, numa=2), node("c3", 700 * MB, **more)]


def placed(facts: list[NodeFacts], **wishes: Any) -> Placement:
    return place(SMALL, LAYOUT, facts, ClusterWishes(**{"positions": 64, **wishes}))


def verdicts(facts: list[NodeFacts]) -> list[Verdict]:
    return [Verdict(one, ()) for one in facts]


def test_each_actor_is_told_its_nodes_folders_and_bytes() -> None:
    facts = nodes()
    placement = placed(facts)
    check_nodes(placement, facts)
    plan = placed_plan(placement, facts, SPEC, joined=True)
    assert len(plan.stages) == len(placement.stages) == 4 and len(plan.shards) == 4
    for spec, actor in zip(plan.actors, (*placement.stages, *placement.shards), strict=True):
        here = facts[actor.node]
        assert spec.node_id == here.node_id and spec.memory_bytes == actor.budget.total_bytes
        where = spec.checkpoint
        assert (where.model_dir, where.config_path, where.config) == (Path(f"/{here.name}/m"), None, SMALL)
        assert where.partial and where.num_layers == 9
        assert (spec.threads, spec.cores, spec.numa, spec.experts) == (
            actor.threads, actor.cores, actor.numa, placement.experts,
        )  # fmt: skip
        assert part_name(spec) == actor.budget.name
        assert (spec.numa_bytes is None) == (actor.numa is None)
    assert all(stage.tape is not None and str(stage.tape.folder).endswith("/t") for stage in plan.stages)
    on_second = [one for one in plan.actors if one.numa == 1]
    assert [one.numa_bytes for one in on_second] == [sum(one.memory_bytes or 0 for one in on_second)] * 2
    owners = ExpertOwners(4, SMALL.num_experts, placement.experts)
    for number, shard in enumerate(plan.shards):
        held = owners.held_by(number, SMALL.moe_layers, SMALL.num_experts)
        assert sum(int(mask.sum()) for mask in held.values()) == placement.shards[number].budget.owned_experts
        assert shard.cache_slots == placement.shards[number].budget.cache_slots
    alone = placed_plan(placement, facts, SPEC, joined=False)
    assert all(spec.node_id is None and spec.memory_bytes is None for spec in alone.actors)


def test_nodes_are_found_by_name_then_by_address() -> None:
    facts = nodes()
    placement = placed(facts)
    again = [replace(one, node_id=f"new-{one.name}") for one in reversed(facts)]
    assert [one.node_id for one in nodes_of(placement, verdicts(again))] == ["new-a1", "new-b2", "new-c3"]
    renamed = [replace(one, name=f"other-{one.name}") for one in facts]
    assert nodes_of(placement, verdicts(renamed)) == renamed
    with pytest.raises(PlacementRefused, match="node b2: not in the cluster, which has a1, c3: start Ray there"):
        nodes_of(placement, verdicts([facts[0], facts[2]]))
    judged = [*verdicts(facts[:2]), Verdict(facts[2], ("numpy 1, here 2: install the same",))]
    with pytest.raises(PlacementRefused, match="node c3: numpy 1, here 2") as refused:
        nodes_of(placement, judged)
    assert refused.value.exit_code == 2
    twice = [replace(facts[0], name="a1"), replace(facts[1], name="elsewhere", address=facts[0].address)]
    with pytest.raises(PlacementRefused, match="node b2: not in the cluster"):
        nodes_of(placement, verdicts(twice))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"available_bytes": 300 * MB, "decided_by": "a cgroup"}, "c3: the plan takes 0.59 GB (libraries, once"),
        ({"models": (ModelCopy("/c3/m", "", "d", False, (0, 1, 2), True),)}, "whole in no folder there"),
        ({"models": (ModelCopy("/c3/m", "", "d", False, LAYERS, False),)}, "needs the embedding or the head"),
        ({"numa": ()}, "which it may not use there (allowed: [])"),
        ({"tapes": (TapeCopy("/c3/t", "p", "", 2 * CHUNK),)}, f"chunks of {CHUNK} bytes, /c3/t has {2 * CHUNK}"),
    ],
)
def test_what_a_node_lacks_is_said_with_the_arithmetic(change: dict[str, Any], said: str) -> None:
    facts = nodes()
    placement = placed(facts)
    with pytest.raises(PlacementRefused) as refused:
        check_nodes(placement, [*facts[:2], replace(facts[2], **change)])
    assert said in str(refused.value), refused.value


def test_a_memory_node_that_is_gone_and_a_command_elsewhere() -> None:
    facts = nodes()
    placement = placed(facts)
    other = node("b2", 2000 * MB)
    one = replace(other, numa=(replace(other.numa[0], cores=facts[1].cores),))
    with pytest.raises(PlacementRefused, match="is planned for memory node 1, which is not there"):
        check_nodes(placement, [facts[0], one, facts[2]])
    moved = [replace(one, driver=one.name == "c3") for one in facts]
    with pytest.raises(PlacementRefused, match="node c3: the plan has this command run on a1: run it there"):
        check_nodes(placement, moved)
    check_nodes(placement, [replace(one, driver=False) for one in facts])  # it runs on a node without actors


def test_a_stage_without_a_tape_holds_all_or_is_refused() -> None:
    """A plan that streams needs the tape; for nodes without one all of a stage's trunk is planned in memory."""
    facts = [node("a1", 9000 * MB, driver=True, tapes=()), node("b2", 9000 * MB), node("c3", 9000 * MB)]
    plan = placed_plan(placed(facts), facts, SPEC, joined=True)
    assert [stage.tape is None for stage in plan.stages] == [True, False, False]
    rooms = range(500 * MB, 900 * MB, MB // 10)
    least = rooms[bisect_left(rooms, 1, key=lambda room: _fits(node("a1", room, driver=True)))]
    small = node("a1", least, driver=True, tapes=())
    streaming = placed([small], preset="max", shards=0)
    assert streaming.stages[0].budget.streamed_bytes
    with pytest.raises(PlacementRefused, match=r"node a1: layers 0\.\.8 streams .* there is no tape: make one with"):
        check_nodes(streaming, [small])
    with pytest.raises(PlacementFailure, match="it has no tape, so that all of a stage's trunk has to stay"):
        placed([small], preset="max", shards=0, packed=False)
    more = placed([replace(small, available_bytes=least + 20 * MB)], preset="max", shards=0, packed=False)
    assert not more.stages[0].budget.streamed_bytes


def _fits(one: NodeFacts) -> int:
    try:
        return len(placed([one], preset="max", shards=0).stages)
    except PlacementFailure:
        return 0


@given(st.integers(0, 3), st.booleans())
def test_one_actor_may_be_told_another_place(number: int, shard: bool) -> None:
    facts = nodes()
    plan = placed_plan(placed(facts), facts, SPEC, joined=True)
    old = plan.shards[number] if shard else plan.stages[number]
    moved = with_spec(plan, number, replace(old, node_id="elsewhere", cache_slots=1))
    changed = [one for one, before in zip(moved.actors, plan.actors, strict=True) if one != before]
    assert [one.node_id for one in changed] == ["elsewhere"] and part_name(changed[0]) == part_name(old)


def test_the_plan_in_lines() -> None:
    placement = placed(nodes())
    budget = PlacedBudget(placement)
    lines = budget.describe().splitlines()
    assert lines[0].startswith("plan: 4 stages and 4 expert shards on 3 nodes, ") and len(lines) == 4
    assert lines[1].startswith("  a1: layers 0..") and "shard 0 of 4 (room for" in lines[1]
    assert budget.total_bytes == sum(budget.parts().values())
