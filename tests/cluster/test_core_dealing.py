"""Cores of actors that move: those that the fewest have, within one memory node, always the same answer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from k3ray.cluster.actor_calls import ActorId
from k3ray.cluster.core_dealing import DealtCores, cores_of_moves, deal_cores
from k3ray.cluster.homes import Spec
from k3ray.cluster.relocation import Move
from k3ray.cluster.topology import NodeFacts, NumaNode
from k3ray.workers.specs import CheckpointSpec, ShardSpec

GB = 10**9
MODEL = CheckpointSpec(Path("model"), None, 9)


def node(sizes: list[int], threads: int | None = None, available: int = 64 * GB) -> NodeFacts:
    """A node with so many cores in each of its memory nodes, whose numbers are odd and scattered."""
    numa, first = [], 1
    for number, size in enumerate(sizes):
        numa.append(NumaNode(number, tuple(range(first, first + 2 * size, 2)), GB))
        first += 2 * size
    return NodeFacts("n", "n", "n", first, sum(sizes) if threads is None else threads, tuple(numa), available)


def spec(cores: tuple[int, ...], numa: int | None = None, nbytes: int = GB, node_id: str = "n") -> Spec:
    return ShardSpec(MODEL, 0, 1, len(cores), cores, node_id=node_id, numa=numa, memory_bytes=nbytes)


def move(number: int, threads: int, nbytes: int = GB) -> Move:
    return Move(ActorId("stage", number), "n", threads, 0, 0, 0, nbytes)


def test_an_actor_that_moves_gets_the_cores_that_nobody_has() -> None:
    facts = node([6])
    dealt = deal_cores(facts, [spec((1, 3))], [move(0, 1), move(1, 2)])
    assert dealt[ActorId("stage", 1)] == DealtCores(2, (5, 7), None)
    assert dealt[ActorId("stage", 0)] == DealtCores(1, (9,), None)
    assert deal_cores(facts, [spec((1, 3, 5, 7)), spec((9, 11))], [move(0, 3)])[ActorId("stage", 0)].cores == (1, 3, 5)


def test_cores_past_the_threads_of_a_node_stay_free() -> None:
    """Of a quota, or of --threads."""
    facts = node([6], threads=2)
    assert deal_cores(facts, [spec((1,))], [move(0, 1), move(1, 2)]) == {
        ActorId("stage", 0): DealtCores(1, (3,), None),
        ActorId("stage", 1): DealtCores(2, (1, 3), None),
    }


def test_a_bound_actor_goes_where_cores_are_free_and_memory_too() -> None:
    facts = node([4, 4], available=20 * GB)  # 9 GB each by the planner's share
    there = [spec((1, 3, 5, 7), 0), spec((9, 11), 1)]
    assert deal_cores(facts, there, [move(0, 2)])[ActorId("stage", 0)] == DealtCores(2, (13, 15), 1)
    full = [there[0], spec((9, 11), 1, nbytes=9 * GB)]
    assert deal_cores(facts, full, [move(0, 2)])[ActorId("stage", 0)] == DealtCores(2, (1, 3), 0)
    assert deal_cores(facts, full, [move(0, 2, 90 * GB)])[ActorId("stage", 0)] == DealtCores(2, (13, 15), 1)
    assert deal_cores(facts, [spec((1, 3, 5, 7))], [move(0, 8)])[ActorId("stage", 0)].numa is None
    two = deal_cores(facts, [], [move(0, 8), move(1, 8)])
    assert {one.numa for one in two.values()} == {0, 1} and all(one.threads == 4 for one in two.values())


SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=3)


@given(SIZES, st.integers(1, 20), st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), max_size=5),
       st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=1, max_size=5), st.booleans())  # fmt: skip
def test_no_core_is_shared_while_another_of_its_place_is_less_used(
    sizes: list[int], threads: int, staying: list[tuple[int, int]], coming: list[tuple[int, int]], bound: bool
) -> None:
    facts = node(sizes, threads)
    several = len(sizes) > 1
    places = {place.number: place.cores for place in facts.numa}
    there = []
    for number, count in staying:
        cores = places[number % len(sizes)][:count]
        there.append(spec(cores, number % len(sizes) if bound and several else None))
    moves = [move(number, wanted, gigabytes * GB) for number, (wanted, gigabytes) in enumerate(coming)]
    dealt = deal_cores(facts, there, moves)
    assert dealt == deal_cores(facts, there, moves[::-1]) and set(dealt) == {one.actor for one in moves}
    uses = Counter(core for one in there for core in one.cores)
    for one in sorted(moves, key=lambda one: (-one.threads, one.actor)):
        found = dealt[one.actor]
        assert (found.numa is not None) == (several and (bound or not there))
        usable = facts.cores[: max(1, threads)] if found.numa is None else places[found.numa]
        assert set(found.cores) <= set(usable) and len(set(found.cores)) == len(found.cores)
        assert 1 <= found.threads <= one.threads and len(found.cores) == min(found.threads, len(usable))
        if found.numa is None:
            assert found.threads == min(one.threads, threads)
            spared = set(usable) - set(found.cores)
            assert all(uses[taken] <= uses[core] for taken in found.cores for core in spared)
        uses.update(found.cores)


def test_moves_to_several_nodes_count_only_who_stays_there() -> None:
    facts = {"n": node([4]), "m": node([4])}
    specs = {
        ActorId("shard", 0): spec((1,)),
        ActorId("shard", 1): spec((1, 3), node_id="m"),
        ActorId("stage", 0): spec((3,)),  # it moves itself
        ActorId("stage", 1): spec((1, 3), node_id="gone"),
    }
    moves = {one.actor: one for one in (move(0, 1), Move(ActorId("stage", 1), "m", 2, 0, 0, 0, GB))}
    assert {actor: one.cores for actor, one in cores_of_moves(moves, facts, specs).items()} == {
        ActorId("stage", 0): (3,),
        ActorId("stage", 1): (5, 7),
    }
