"""Links that are cut between two nodes which the driver both reaches: waited for, then gone round, the same bits."""

# ruff: noqa: F811
from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3ray.cluster.actor_calls import ActorId, ActorLost
from k3ray.cluster.cut_links import CutLink, Sign, barred_nodes, crossing, cut_off, is_left_idle, ways_round
from k3ray.cluster.recovery_plan import RecoverySettings
from k3ray.cluster.relocation import NoRoom
from k3ray.driver import Driver
from k3ray.workers.stage_sign import StageSign, UnreachedShard
from tests.cluster.test_recovering_chain import (  # noqa: F401 - fixtures
    CHUNK,
    GEN,
    PREFILL,
    expected,
    hash_on,
    repeated,
    spec,
)
from tests.cluster.test_recovery_over_nodes import SNAPSHOTS, PlacedFakes, Started, View, start

SETTINGS = replace(SNAPSHOTS, frame_s=1.0, sign_s=1.0, shortest_deadline_s=20.0)
DECODE = PREFILL + 3
STAGES = [ActorId("stage", number) for number in range(3)]
SHARDS = [ActorId("shard", number) for number in range(3)]


class Wires:
    """Links between the nodes of a run, as its actors meet them."""

    def __init__(self, actors: PlacedFakes) -> None:
        self._actors = actors
        self.cut: set[frozenset[str]] = set()
        actors.is_cut = self._is_cut

    def _is_cut(self, one: ActorId, other: ActorId) -> bool:
        return (
            bool(self.cut) and frozenset(str(self._actors.spec_of(actor).node_id) for actor in (one, other)) in self.cut
        )


def wired(k3b_dir: Path, settings: RecoverySettings = SETTINGS, budget: int | None = None) -> tuple[Started, Wires]:
    started = start(k3b_dir, settings) if budget is None else start(k3b_dir, settings, budget)
    return started, Wires(started[0])


def cut_between(wires: Wires, *nodes: str) -> None:
    wires.cut.add(frozenset(nodes))


def nodes_of(actors: PlacedFakes, kind: str) -> list[str | None]:
    return [one.node_id for one in (actors.plan.stages if kind == "stage" else actors.plan.shards)]


@pytest.mark.parametrize("nth", [PREFILL + 1, DECODE, PREFILL + GEN - 1])
def test_shards_that_stages_do_not_reach_go_where_all_reach_them(k3b_dir: Path, expected: str, nth: int) -> None:
    (actors, _, chain, _), wires = wired(k3b_dir)
    actors.moments["stage 1", "apply", nth] = lambda: cut_between(wires, "b", "c")
    assert hash_on(Driver(chain, CHUNK)) == expected
    assert [recovery.lost for recovery in chain.recoveries] == [("shard 1", "shard 2")]
    (recovery,) = chain.recoveries
    assert recovery.places == ("shard 1: b -> a", "shard 2: c -> a")
    assert recovery.layer_steps == 0 and not repeated(actors)
    (cut,) = recovery.cuts
    assert cut.startswith("the link between b and c is cut: stage ") and cut in recovery.describe()
    assert nodes_of(actors, "stage") == ["a", "b", "c"] and nodes_of(actors, "shard") == ["a", "a", "a"]


def test_a_frame_that_does_not_get_through_goes_through_the_driver_from_then_on(k3b_dir: Path, expected: str) -> None:
    (actors, _, chain, _), wires = wired(k3b_dir)
    actors.large_frames = True
    actors.moments["stage 1", "apply", DECODE] = lambda: cut_between(wires, "b", "c")
    assert hash_on(Driver(chain, CHUNK)) == expected
    shards, stage = chain.recoveries
    assert shards.lost == ("shard 1", "shard 2") and stage.lost == ("stage 2",)
    assert stage.places == ("stage 2: c, started again there",) and "it does not get stage 1's" in stage.cuts[0]
    assert set(repeated(actors)) == {2} and stage.restored == 3
    assert stage.layer_steps == repeated(actors)[2] * len(actors.layers_of(2))
    assert chain._log.point(2).place > stage.step  # snapshots go on, behind steps that are sent later


def test_snapshots_stand_behind_the_steps_that_reach_a_stage_late(k3b_dir: Path, expected: str) -> None:
    (actors, _, chain, homes), wires = wired(k3b_dir, replace(SETTINGS, snapshot_every=1))
    actors.large_frames = True
    cut_between(wires, "b", "c")
    homes.note_cut(CutLink(STAGES[1], STAGES[2], "known"))
    homes.find_beyond_cuts = lambda decided: {}
    actors.is_cut = lambda one, other: wires._is_cut(one, other) and other.kind == "stage"  # the shards are reached
    actors.moments["stage 1", "apply", PREFILL + GEN - 1] = lambda: actors.processes[STAGES[2]].kill()
    assert hash_on(Driver(chain, CHUNK)) == expected
    (recovery,) = chain.recoveries
    assert recovery.restored == 3 and recovery.layer_steps <= 3 * len(actors.layers_of(2))


@pytest.mark.parametrize("large", [False, True])
def test_a_link_that_is_back_in_time_moves_nobody(k3b_dir: Path, expected: str, large: bool) -> None:
    (actors, _, chain, _), wires = wired(k3b_dir, replace(SETTINGS, silent_s=20.0, frame_s=20.0))
    actors.large_frames = large

    def strike() -> None:
        cut_between(wires, "b", "c")
        threading.Timer(1.5, wires.cut.clear).start()

    actors.moments["stage 1", "apply", DECODE] = strike
    assert hash_on(Driver(chain, CHUNK)) == expected
    assert not chain.recoveries and not repeated(actors)


def test_what_was_never_reached_is_no_cut_link(k3b_dir: Path, expected: str) -> None:
    """A firewall that closes the shards' ports is the user's to open: the stage says so, and nothing is moved."""
    (_, _, chain, _), wires = wired(k3b_dir)
    cut_between(wires, "b", "c")
    threading.Timer(4 * SETTINGS.silent_s, wires.cut.clear).start()
    assert hash_on(Driver(chain, CHUNK)) == expected
    assert not chain.recoveries


def test_a_node_is_left_where_the_shards_alone_do_not_fit(k3b_dir: Path, expected: str) -> None:
    (actors, view, chain, _), wires = wired(k3b_dir)
    actors.moments["stage 1", "apply", DECODE] = lambda: (cut_between(wires, "b", "c"), view.left.update(a=0))
    assert hash_on(Driver(chain, CHUNK)) == expected
    assert nodes_of(actors, "stage") == nodes_of(actors, "shard") == ["a", "c", "c"]
    assert {name for recovery in chain.recoveries for name in recovery.lost} >= {"stage 1", "shard 1"}
    assert set(repeated(actors)) <= {1}


def test_what_fits_nowhere_ends_with_the_link_and_the_arithmetic(k3b_dir: Path) -> None:
    (actors, view, chain, _), wires = wired(k3b_dir)

    def strike() -> None:
        cut_between(wires, "b", "c")
        view.left.update(a=0, b=0, c=0)

    actors.moments["stage 1", "apply", DECODE] = strike
    with pytest.raises(NoRoom, match=r"the link between b and c is cut, and .*shard 1: a has .*; b does not reach"):
        hash_on(Driver(chain, CHUNK))


def test_the_bound_holds_for_links_too(k3b_dir: Path) -> None:
    (actors, _, chain, _), wires = wired(k3b_dir, replace(SETTINGS, max_recoveries=0))
    actors.moments["stage 1", "apply", DECODE] = lambda: cut_between(wires, "b", "c")
    with pytest.raises(ActorLost, match=r"shard 2 .*--max-recoveries 0"):
        hash_on(Driver(chain, CHUNK))


def test_a_node_that_dies_later_is_not_replaced_over_the_cut_link(k3b_dir: Path, expected: str) -> None:
    """Stage 0's node cannot be lost: it is the driver's. Both ends of the link and then one of them."""
    (actors, view, chain, _), wires = wired(k3b_dir)
    actors.moments["stage 1", "apply", PREFILL + 1] = lambda: cut_between(wires, "b", "c")
    actors.moments["stage 2", "apply", DECODE] = lambda: actors.end_node(view, "c")
    assert hash_on(Driver(chain, CHUNK)) == expected
    assert nodes_of(actors, "shard") == ["a", "a", "a"] and nodes_of(actors, "stage")[2] in ("a", "b")
    assert [recovery.lost for recovery in chain.recoveries] == [("shard 1", "shard 2"), ("stage 2",)]


def test_what_is_said_while_a_shard_is_on_its_way_is_not_of_its_new_place(k3b_dir: Path) -> None:
    """Its new process answers the driver before it has loaded, and the stages do not know of it yet."""
    (actors, _, chain, homes), _ = wired(k3b_dir)
    watch, stage = chain._processes._watch, actors.processes[STAGES[1]]
    stage.unreached[2], stage.reached = time.monotonic() - 60.0, {2}
    assert watch.look() == {SHARDS[2]} and homes.is_cut(STAGES[1], SHARDS[2])
    watch.renewed(SHARDS[2])
    actors.start(SHARDS[2], replace(actors.spec_of(SHARDS[2]), node_id="a")).result()
    assert not watch.look() and not watch.look() and not homes.is_cut(STAGES[1], SHARDS[2])
    watch.started(SHARDS[2])
    assert watch.look() == {SHARDS[2]} and homes.is_cut(STAGES[1], SHARDS[2])  # asked afterwards


def signs(
    unreached_s: float, asked_at: float = 100.0, shard_asked_at: float = 100.0, before: bool = False
) -> dict[ActorId, Sign]:
    said = StageSign(0.0, (UnreachedShard(2, unreached_s, "10.0.0.3 port 4711 has not let us in", before),))
    return {STAGES[1]: Sign(asked_at, said), SHARDS[2]: Sign(shard_asked_at, StageSign())}


def test_only_a_shard_that_the_driver_hears_is_cut_off() -> None:
    settings = RecoverySettings()
    (cut,) = cut_off(signs(20.1), {}, 101.0, settings)
    assert (cut.asker, cut.other) == (STAGES[1], SHARDS[2])
    assert cut.what == "stage 1 has not reached shard 2 for 20 s: 10.0.0.3 port 4711 has not let us in"
    assert not cut_off(signs(20.0), {}, 101.0, settings)
    assert not cut_off(signs(90.0, shard_asked_at=95.9), {}, 101.0, settings)  # silent to the driver as well
    assert not cut_off(signs(90.0, asked_at=95.9), {}, 101.0, settings)
    assert not cut_off(signs(90.0), {SHARDS[2]: 100.0}, 101.0, settings)  # said of the process before
    assert cut_off(signs(90.0), {SHARDS[2]: 99.9}, 101.0, settings)
    assert not cut_off(signs(90.0), {}, 101.0, settings, links_held=False)
    assert cut_off(signs(90.0, before=True), {}, 101.0, settings, links_held=False)


def test_a_stage_is_left_idle_when_it_has_no_work_for_as_long_as_it_is_waited_for() -> None:
    settings = RecoverySettings()
    idle = Sign(100.0, StageSign(31.0))
    assert is_left_idle(idle, 69.0, 101.0, settings)
    assert not is_left_idle(idle, 71.0, 101.0, settings)  # it had no work before it was asked
    assert not is_left_idle(Sign(100.0, StageSign(29.0)), 0.0, 101.0, settings)
    assert not is_left_idle(idle, 69.0, 105.1, settings) and not is_left_idle(None, 0.0, 101.0, settings)


def test_the_shards_alone_move_first_and_then_one_of_the_ends() -> None:
    where = dict(zip([*STAGES, *SHARDS], "abcabc", strict=True))
    assert ways_round(where, []) == [] and ways_round(where, [frozenset("bd")]) == []
    assert ways_round(dict(zip(STAGES, "abc", strict=True)), [frozenset("bc")]) == []  # frames go through the driver
    shards, *ends = ways_round(where, [frozenset("bc")])
    assert shards == {SHARDS[1], SHARDS[2]}
    assert ends == [{SHARDS[1], STAGES[1]}, {SHARDS[2], STAGES[2]}]
    assert ways_round({**where, SHARDS[1]: "a", SHARDS[2]: "a"}, [frozenset("bc")]) == []


@given(
    st.lists(st.sampled_from("abcd"), min_size=6, max_size=6),
    st.sets(st.sampled_from([frozenset(pair) for pair in ("ab", "ac", "ad", "bc", "bd", "cd")]), max_size=3),
)
def test_every_way_leaves_all_stages_with_all_shards(places: list[str], cuts: set[frozenset[str]]) -> None:
    where = dict(zip([*STAGES, *SHARDS], places, strict=True))
    ways = ways_round(where, cuts)
    assert bool(ways) == bool(crossing(where, cuts))
    for moving in ways:
        staying = {actor: node for actor, node in where.items() if actor not in moving}
        assert not crossing(staying, cuts)
        for actor in moving:
            allowed = set("abcd") - barred_nodes(actor, moving, where, cuts)
            assert all(not crossing({**staying, actor: node}, cuts) for node in allowed)
            assert all(crossing({**staying, actor: node}, cuts) for node in set("abcd") - allowed)


def test_processes_of_one_node_are_no_cut_link(k3b_dir: Path) -> None:
    (_, _, _, homes), _ = wired(k3b_dir)
    assert homes.note_cut(CutLink(STAGES[1], SHARDS[1], "what")) == "what" and not homes.is_cut(STAGES[1], SHARDS[1])
    assert homes.note_cut(CutLink(STAGES[1], SHARDS[2], "what")) == "the link between b and c is cut: what"
    assert homes.is_cut(STAGES[2], STAGES[1]) and not homes.is_cut(STAGES[0], STAGES[1])
    assert View.own_id == "a"
