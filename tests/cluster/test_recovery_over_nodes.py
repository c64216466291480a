"""Nodes that are lost, answers that are lost, snapshots that break on the way: in one process, with the same bits."""

# ruff: noqa: F811
from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k3ray.cluster.actor_calls import ActorGone, ActorId, AnswerLost, InputLost
from k3ray.cluster.living_nodes import HeadLost, LivingNodes, PlacedRun
from k3ray.cluster.placed_plan import placed_plan
from k3ray.cluster.placement import place
from k3ray.cluster.plan import make_plan
from k3ray.cluster.recovering_chain import RecoveringChain
from k3ray.cluster.recovery_plan import RecoverySettings
from k3ray.cluster.relocation import NoRoom
from k3ray.cluster.seat_costs import LayerCosts
from k3ray.cluster.seats import ClusterWishes
from k3ray.cluster.topology import ModelCopy, NodeFacts, NumaNode
from k3ray.driver import Driver
from k3ray.workers.held_snapshot import SnapshotChunk
from k3ray.workers.loading import CheckpointSpec
from k3ray.workers.model.config import read_config
from k3ray.workers.tape.layout import plan_layout
from tests.cluster.test_recovering_chain import (  # noqa: F401 - fixtures
    CHUNK,
    GEN,
    PREFILL,
    PROMPT,
    SETTINGS,
    as_dict,
    expected,
    hash_on,
    repeated,
    spec,
)
from tests.fake_actors import FakeActors, Fault, Ticket
from tests.workers.test_damaged import overwrite

SNAPSHOTS = RecoverySettings(**{**as_dict(SETTINGS), "snapshot_every": 2, "sign_s": 0.3})
BUDGET = 1_200_000_000
POSITIONS = 32


def facts(name: str, folder: Path, available: int = 4_000_000_000) -> NodeFacts:
    copy = ModelCopy(str(folder), "print", "digest", True, tuple(range(9)), True)
    numa = (NumaNode(0, (0, 1), available),)
    return NodeFacts(name, name, name, 2, 2, numa, available, "", available, models=(copy,), driver=name == "a")


class View:
    """A cluster of nodes that are named by their ids."""

    own_id = "a"

    def __init__(self, nodes: Sequence[NodeFacts]) -> None:
        self.nodes = {node.node_id: node for node in nodes}
        self.dead: set[str] = set()
        self.believed: set[str] = set()  # dead ones of which the cluster does not know yet
        self.head_is_silent = False
        self.left: dict[str, int] = {}  # what the cluster gives, where it says so
        self.held: list[tuple[str, int]] = []

    def alive(self) -> Collection[str]:
        return [node for node in self.nodes if node not in self.dead - self.believed]

    def answers(self, node_id: str) -> bool:
        return node_id not in self.dead

    def silent(self) -> str:
        return "the head" if self.head_is_silent else ""

    def memory_left(self) -> Mapping[str, int]:
        return self.left

    def hold_memory(self, node_id: str, nbytes: int) -> None:
        self.held.append((node_id, nbytes))

    def look_at(self, node_ids: Collection[str]) -> Sequence[NodeFacts]:
        return [self.nodes[node] for node in node_ids if node not in self.dead]


class PlacedFakes(FakeActors):
    """Fake actors on nodes; at a chosen call something happens."""

    def __init__(self, plan: Any, faults: list[Fault] | None = None) -> None:
        self.moments: dict[tuple[str, str, int], Callable[[], None]] = {}
        self.sent: Counter[tuple[str, str]] = Counter()
        self.answers: dict[tuple[str, str, int], Callable[[Ticket], Ticket]] = {}
        super().__init__(plan, faults or [])

    def call(self, actor: ActorId, method: str, *arguments: Any) -> Ticket:
        self.sent[str(actor), method] += 1
        key = (str(actor), method, self.sent[str(actor), method])
        ticket = super().call(actor, method, *arguments)
        if key in self.moments:
            self.moments.pop(key)()
        return self.answers.pop(key)(ticket) if key in self.answers else ticket

    def call_aside(self, actor: ActorId, method: str, *arguments: Any) -> Ticket:
        self.sent[str(actor), method] += 1
        ticket = super().call_aside(actor, method, *arguments)
        change = self.answers.pop((str(actor), method, self.sent[str(actor), method]), None)
        return change(ticket) if change else ticket

    def end_node(self, view: View, node: str) -> None:
        view.dead.add(node)
        for actor, process in self.processes.items():
            if self.spec_of(actor).node_id == node:
                process.kill()


Started = tuple[PlacedFakes, View, RecoveringChain, LivingNodes]


def start(k3b_dir: Path, settings: RecoverySettings = SNAPSHOTS, budget: int = BUDGET) -> Started:
    config = read_config(k3b_dir)
    nodes, layout = [facts(name, k3b_dir) for name in "abc"], plan_layout(config)
    placement = place(config, layout, nodes, ClusterWishes(memory_bytes=budget, positions=POSITIONS))
    checkpoint = CheckpointSpec(k3b_dir, None, config.num_hidden_layers, config=config)
    actors, view = PlacedFakes(placed_plan(placement, nodes, checkpoint, True)), View(nodes)
    homes = LivingNodes(actors, PlacedRun(placement, tuple(nodes), LayerCosts(config, layout, POSITIONS)), view)
    return actors, view, RecoveringChain(actors, settings, homes=homes), homes


@pytest.mark.parametrize("believed", [False, True], ids=["known", "still believed in"])
@pytest.mark.parametrize(
    ("node", "method", "nth"),
    [("b", "apply", 1), ("b", "apply", PREFILL + 1), ("c", "apply", PREFILL + GEN - 1), ("b", "snapshot", 2),
     ("c", "open_sequence", 2)],
)  # fmt: skip
def test_a_lost_node_is_a_lost_stage_and_a_lost_shard(
    k3b_dir: Path,
    expected: str,
    node: str,
    method: str,
    nth: int,
    believed: bool,
) -> None:
    actors, view, chain, _ = start(k3b_dir)
    stage = {"b": "stage 1", "c": "stage 2"}[node]
    if believed:
        view.believed.add(node)
    actors.moments[stage, method, nth] = lambda: actors.end_node(view, node)
    assert hash_on(Driver(chain, CHUNK)) == expected
    assert set(repeated(actors)) <= {int(stage[-1])}
    lost = [name for recovery in chain.recoveries for name in recovery.lost]
    assert sorted(lost) == [f"shard {stage[-1]}", stage]
    places = " ".join(place for recovery in chain.recoveries for place in recovery.places)
    assert f"{stage}: {node} -> " in places and all(f"-> {node}" not in place for place in places)
    assert {one.node_id for one in (*actors.plan.stages, *actors.plan.shards)} == set("abc") - {node}
    layers = len(actors.layers_of(int(stage[-1])))
    again = sum(recovery.layer_steps for recovery in chain.recoveries)
    assert 0 <= sum(repeated(actors).values()) * layers - again <= layers  # and the step whose answer died with it


def test_one_lost_node_is_one_recovery_of_the_bound(k3b_dir: Path, expected: str) -> None:
    """The shard that is cut off with the stage has not been found silent yet."""
    actors, view, chain, _ = start(k3b_dir, RecoverySettings(**{**as_dict(SNAPSHOTS), "max_recoveries": 1}))

    def strike() -> None:
        view.dead.add("b")
        actors.processes[ActorId("stage", 1)].kill()

    actors.moments["stage 1", "apply", 6] = strike
    assert hash_on(Driver(chain, CHUNK)) == expected
    assert sorted(name for recovery in chain.recoveries for name in recovery.lost) == ["shard 1", "stage 1"]
    assert "b" not in {one.node_id for one in (*actors.plan.stages, *actors.plan.shards)}


def test_two_nodes_one_after_the_other(k3b_dir: Path, expected: str) -> None:
    actors, view, chain, _ = start(k3b_dir, budget=2 * BUDGET)
    actors.moments["stage 1", "apply", 5] = lambda: actors.end_node(view, "b")
    actors.moments["stage 2", "apply", 8] = lambda: actors.end_node(view, "c")
    assert hash_on(Driver(chain, CHUNK)) == expected
    assert {one.node_id for one in (*actors.plan.stages, *actors.plan.shards)} == {"a"}


def test_every_move_of_an_actor_that_moved_twice_is_told(k3b_dir: Path, expected: str) -> None:
    """Its new node is lost while it is told its state there: one record names both moves."""
    actors, view, chain, _ = start(k3b_dir, budget=2 * BUDGET)
    stage = ActorId("stage", 1)

    def lose_the_next() -> None:
        actors.end_node(view, actors.spec_of(stage).node_id)

    actors.moments["stage 1", "apply", 5] = lambda: actors.end_node(view, "b")
    actors.moments["stage 1", "finish_restore", 1] = lose_the_next
    assert hash_on(Driver(chain, CHUNK)) == expected
    told = [place.split(": ")[1] for recovery in chain.recoveries for place in recovery.places if "stage 1" in place]
    assert told == ["b -> c", "c -> a"], [recovery.places for recovery in chain.recoveries]


def test_a_process_that_ends_on_a_node_that_lives_is_started_again_there(k3b_dir: Path, expected: str) -> None:
    actors, _, chain, _ = start(k3b_dir)
    actors.moments["stage 1", "apply", 6] = lambda: actors.processes[ActorId("stage", 1)].kill()
    assert hash_on(Driver(chain, CHUNK)) == expected
    assert [recovery.places for recovery in chain.recoveries] == [("stage 1: b, started again there",)]


def test_a_process_that_cannot_be_started_again_there_goes_elsewhere(k3b_dir: Path, expected: str) -> None:
    actors, _, chain, _ = start(k3b_dir)
    actors.faults.append(Fault(ActorId("stage", 1), "load", 2))
    actors.moments["stage 1", "apply", 6] = lambda: actors.processes[ActorId("stage", 1)].kill()
    assert hash_on(Driver(chain, CHUNK)) == expected
    (recovery,) = chain.recoveries
    assert recovery.lost == ("stage 1", "stage 1") and actors.plan.stages[1].node_id in ("a", "c")


def test_a_node_that_joined_in_the_middle_is_used(k3b_dir: Path, expected: str) -> None:
    tight = start(k3b_dir)[3]._run.placement
    budget = max(tight.node_bytes(number) for number in range(3)) + 1_000_000
    actors, view, chain, _ = start(k3b_dir, budget=budget)

    def strike() -> None:
        view.nodes["d"] = facts("d", k3b_dir)
        actors.end_node(view, "b")

    actors.moments["stage 1", "apply", 6] = strike
    assert hash_on(Driver(chain, CHUNK)) == expected
    assert {actors.plan.stages[1].node_id, actors.plan.shards[1].node_id} == {"d"}
    assert {actors.plan.stages[1].cores, actors.plan.shards[1].cores} == {(0,), (1,)}
    once = sum(tight.nodes[1].parts.values())  # as on b, which has no driver either
    assert view.held == [("d", once)]


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_node_that_joined_has_room_for_what_it_needs_once_too(k3b_dir: Path, lacking: int) -> None:
    tight = start(k3b_dir)[3]._run.placement
    budget = max(tight.node_bytes(number) for number in range(3)) + 1_000_000
    _, view, _, homes = start(k3b_dir, budget=budget)
    lost = {ActorId("stage", 1), ActorId("shard", 1)}
    view.nodes["d"] = facts("d", k3b_dir)
    view.dead.add("b")
    moved = homes.find_new(lost)
    least = sum(spec.memory_bytes or 0 for spec in moved.values()) + sum(tight.nodes[1].parts.values())
    _, view, _, homes = start(k3b_dir, budget=budget)
    view.nodes["d"] = facts("d", k3b_dir)
    view.dead.add("b")
    view.left = {"d": least - lacking}
    again = homes.find_new(lost)
    assert {spec.node_id for spec in again.values()} == {"d"}
    assert (again == moved) == (not lacking)  # a byte less is a slot less, never a node over what the cluster gives
    if lacking:
        assert sum(spec.memory_bytes or 0 for spec in again.values()) < least - sum(tight.nodes[1].parts.values())


def test_nowhere_to_go_ends_with_the_arithmetic(k3b_dir: Path) -> None:
    tight = start(k3b_dir)[3]._run.placement
    budget = max(tight.node_bytes(number) for number in range(3)) + 1_000_000
    actors, view, chain, _ = start(k3b_dir, budget=budget)
    actors.moments["stage 1", "apply", 6] = lambda: actors.end_node(view, "b")
    with pytest.raises(NoRoom, match=r"shard 1: a has .* of its budget free, and at least .* are needed there"):
        hash_on(Driver(chain, CHUNK))


def test_a_silent_head_ends_the_run(k3b_dir: Path) -> None:
    actors, view, chain, homes = start(k3b_dir)
    now = [0.0]
    homes._head_asked = homes._head_answered = 0.0
    homes._clock = lambda: now.__setitem__(0, now[0] + 2.0) or now[0]
    actors.moments["stage 1", "apply", 5] = lambda: setattr(view, "head_is_silent", True)
    with pytest.raises(HeadLost, match=r"the head has not answered for \d+ s") as caught:
        hash_on(Driver(chain, CHUNK))
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("what", ["changed", "cut", "gone"])
def test_a_snapshot_that_breaks_on_the_way_leaves_the_one_before(k3b_dir: Path, expected: str, what: str) -> None:
    actors, view, chain, _ = start(k3b_dir)

    def spoil(ticket: Ticket) -> Ticket:
        chunk, found = ticket.result(), Ticket()
        wrong = {"changed": bytes([chunk.contents[0] ^ 1]) + chunk.contents[1:], "cut": chunk.contents[:-1]}
        if what == "gone":
            found.set_exception(ActorGone("its node is gone"))
        else:
            found.set_result(SnapshotChunk(wrong[what], chunk.digest))
        return found

    actors.answers["stage 1", "snapshot_chunk", 4] = spoil  # three sequences: the second round
    actors.moments["stage 1", "apply", PREFILL + GEN - 1] = lambda: actors.end_node(view, "b")
    assert hash_on(Driver(chain, CHUNK)) == expected
    assert ("changed" in chain._rounds.refused or "another digest" in chain._rounds.refused) == (what != "gone")
    assert set(repeated(actors)) == {1} and sum(recovery.restored for recovery in chain.recoveries) == 3
    assert all(recovery.pulled_bytes or recovery.lost == ("stage 1",) for recovery in chain.recoveries)


def test_an_answer_lost_on_the_way_is_asked_for_again(k3b_dir: Path, expected: str) -> None:
    actors, _, chain, _ = start(k3b_dir)

    def lose(error: ActorGone) -> Callable[[Ticket], Ticket]:
        def change(ticket: Ticket) -> Ticket:
            ticket.result()  # it was applied
            found = Ticket()
            found.set_exception(error)
            return found

        return change

    actors.answers["stage 1", "apply", PREFILL + 2] = lose(AnswerLost("the link was down"))
    actors.answers["stage 2", "apply", PREFILL + 3] = lose(InputLost("stage 1's node had it"))
    assert hash_on(Driver(chain, CHUNK)) == expected
    assert not chain.recoveries and repeated(actors) == {1: 1, 2: 1}  # asked again, and answered as recorded


def test_a_shard_whose_arithmetic_hangs_is_replaced_and_not_its_stage(
    k3b_dir: Path, spec: CheckpointSpec, expected: str
) -> None:
    quick = RecoverySettings(**{**as_dict(SETTINGS), "shortest_deadline_s": 1.5, "slow_factor": 2.0})
    actors = FakeActors(make_plan(spec, 3, 2, 1, ()), [Fault(ActorId("shard", 1), "apply", 30, "is stuck")])
    chain = RecoveringChain(actors, quick)
    assert hash_on(Driver(chain, CHUNK)) == expected
    assert [recovery.lost for recovery in chain.recoveries] == [("shard 1",)] and not repeated(actors)


def test_a_damaged_expert_that_only_a_lost_shard_met_is_reported(k3b_dir: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(k3b_dir, model, ignore=shutil.ignore_patterns("golden.*"))
    layer = "language_model.model.layers.2."
    for expert in range(read_config(model).num_experts):
        overwrite(model, f"{layer}block_sparse_moe.experts.{expert}.w1.weight_scale", b"\xff")
    plan = make_plan(CheckpointSpec(model, None, 9), 3, 2, 1, ())
    actors = FakeActors(plan, [])
    chain = RecoveringChain(actors, SETTINGS)
    driver = Driver(chain, CHUNK)
    session = driver.open(POSITIONS)
    driver.forward({session: PROMPT})
    met = {
        one for number in range(2) for one in actors.processes[ActorId("shard", number)].parts["store"].damaged_met()
    }
    for number in range(2):
        actors.processes[ActorId("shard", number)].kill()
    assert met and {2} == {layer for layer, _ in met} and set(chain.damaged_met()) == met
    assert replace(SETTINGS, snapshot_every=0) == SETTINGS  # no snapshot had asked them before
