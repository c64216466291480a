"""The nodes of a run that goes on while some of them are lost: where each actor lives, and what the others have free.

It acts on what a view of the cluster says (ray_view.py) and decides by relocation.py; it starts and ends nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from k3ray.cluster.actor_calls import ActorId, ActorLost, all_actors
from k3ray.cluster.cluster_view import ClusterView, PlacedActors
from k3ray.cluster.core_dealing import DealtCores, cores_of_moves
from k3ray.cluster.cut_links import CutLink, Pair, barred_nodes, crossing, describe_cuts, ways_round
from k3ray.cluster.homes import NewSpecs, Spec
from k3ray.cluster.moved_parts import lost_part
from k3ray.cluster.placed_plan import model_on
from k3ray.cluster.placement import Placement
from k3ray.cluster.relocation import LostPart, Move, NoRoom, Room, relocate
from k3ray.cluster.seat_costs import LayerCosts
from k3ray.cluster.seats import ClusterWishes, make_seats
from k3ray.cluster.topology import NodeFacts
from k3ray.workers.specs import StageSpec, TapeSpec

HEAD_LOOK_S = 1.0
HEAD_SILENT_S = 20.0  # a head that does not accept a connection for so long is lost
BELIEVED_S = 5.0  # a node that does not answer is not asked again before; one that does may die at once


class HeadLost(ActorLost):
    """The head of the Ray cluster, or this host's own part of it, does not answer any more."""


@dataclass(frozen=True, slots=True)
class PlacedRun:
    """What a run on several nodes was planned from. nodes: the facts of the placement's nodes, in its order."""

    placement: Placement
    nodes: tuple[NodeFacts, ...]
    costs: LayerCosts


class LivingNodes:
    """Homes (cluster/homes.py) of the actors of a placed run."""

    def __init__(
        self,
        actors: PlacedActors,
        run: PlacedRun,
        view: ClusterView,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._actors = actors
        self._run = run
        self._view = view
        self._clock = clock
        self._wait = wait
        self._facts = {node.node_id: node for node in run.nodes}
        self._budget = {
            node.node_id: run.placement.nodes[number].budget_bytes - run.placement.node_bytes(number)
            for number, node in enumerate(run.nodes)
        }  # what is left of it: the moves come off
        self._once: dict[str, int] = {}  # what nodes that joined need once, until that is held there
        self._cuts: set[Pair] = set()  # nodes that do not reach each other, though this process reaches both
        self._silent: dict[str, float] = {}  # when a node was found not to answer
        self._head_answered = clock()
        self._head_asked = clock()

    def is_near(self, actor: ActorId) -> bool:
        """Whether an actor is on this process's node."""
        return self._node_of(actor) == self._view.own_id

    def name_of(self, actor: ActorId) -> str:
        """Return the name of an actor's node."""
        node = self._node_of(actor)
        return self._facts[node].name if node in self._facts else node

    def is_reachable(self, actor: ActorId) -> bool:
        """Whether an actor's node is alive and accepts a connection."""
        return self._reaches(self._node_of(actor))

    def beside(self, actor: ActorId) -> frozenset[ActorId]:
        """Return all actors of an actor's node."""
        node = self._node_of(actor)
        return frozenset(one for one in all_actors(self._actors) if self._node_of(one) == node)

    def find_new(self, lost: Collection[ActorId]) -> NewSpecs:
        """Place lost actors on other nodes than theirs; raises NoRoom, HeadLost.

        Nodes that have joined meanwhile are looked at, which takes some seconds.
        """
        left = {self._node_of(actor) for actor in lost}
        if self._view.own_id in left:
            raise NoRoom(f"{', '.join(map(str, sorted(lost)))}: this host itself is not reachable any more")
        return self._place(lost, left, self._where())

    def note_cut(self, cut: CutLink) -> str:
        """Believe from now on that the nodes of these two do not reach each other; returns that in words."""
        ends = frozenset((self._node_of(cut.asker), self._node_of(cut.other)))
        if len(ends) == 1:
            return cut.what
        self._cuts.add(ends)
        return f"{self._named([ends])} is cut: {cut.what}"

    def is_cut(self, one: ActorId, other: ActorId) -> bool:
        """Whether the nodes of two actors are believed not to reach each other."""
        return frozenset((self._node_of(one), self._node_of(other))) in self._cuts

    def find_beyond_cuts(self, decided: Mapping[ActorId, Spec | None]) -> NewSpecs:
        """Place what has to move so that every stage reaches every shard; nothing where it does. Raises NoRoom.

        decided: what others are about to be loaded with.
        """
        where = self._where() | {actor: str(spec.node_id) for actor, spec in decided.items() if spec is not None}
        refused = None
        for moving in ways_round(where, self._cuts):
            try:
                return self._place(moving, (), where)
            except NoRoom as error:
                refused = refused or error
        if refused is not None:
            raise NoRoom(f"{self._named(self._cuts)} is cut, and {refused}")
        return {}

    def _place(self, moving: Collection[ActorId], left: Collection[str], where: Mapping[ActorId, str]) -> NewSpecs:
        """Place actors on nodes other than those `left`, where they reach those that stay. where: each one's node."""
        for facts in self._view.look_at([node for node in self._view.alive() if node not in self._facts]):
            self._add(facts)
        declared = self._view.memory_left()
        rooms = [
            self._room(facts, self._free(node, declared.get(node)))
            for node, facts in self._facts.items()
            if node not in left and self._reaches(node)
        ]
        barred = {actor: barred_nodes(actor, moving, where, self._cuts) for actor in moving}
        parts = [replace(self._part(actor), barred=barred[actor]) for actor in sorted(moving)]
        moves = relocate(parts, rooms, self._run.costs)
        after = {**where, **{actor: move.node_id for actor, move in moves.items()}}
        if beyond := crossing(after, self._cuts) & {*moving}:
            raise NoRoom(f"{', '.join(map(str, sorted(beyond)))}: found no place which every stage would reach")
        for move in moves.values():
            self._budget[self._node_of(move.actor)] += self._actors.spec_of(move.actor).memory_bytes or 0
            self._budget[move.node_id] -= move.planned_bytes
            if once_bytes := self._once.pop(move.node_id, 0):
                self._view.hold_memory(move.node_id, once_bytes)
        specs = {actor: self._actors.spec_of(actor) for actor in all_actors(self._actors)}
        cores = cores_of_moves(moves, self._facts, specs)
        return {actor: self._spec(move, cores[actor]) for actor, move in moves.items()}

    def check_own(self) -> None:
        """Raise HeadLost when the head or Ray on this host has not answered for HEAD_SILENT_S; asked now and then."""
        if self._clock() - self._head_asked >= HEAD_LOOK_S:
            self._ask_own()

    def await_own(self) -> None:
        """Wait until the head and Ray on this host answer; raises HeadLost."""
        while not self._ask_own():
            self._wait(HEAD_LOOK_S)

    def _ask_own(self) -> bool:
        now = self._head_asked = self._clock()
        silent = self._view.silent()
        if not silent:
            self._head_answered = now
        elif now - self._head_answered > HEAD_SILENT_S:
            raise HeadLost(
                f"{silent} has not answered for {now - self._head_answered:.0f} s, and nothing can be started without "
                "it; start the cluster and then the run again"
            )
        return not silent

    def _named(self, pairs: Iterable[Pair]) -> str:
        return describe_cuts([self._facts[node].name for node in pair] for pair in pairs)

    def _where(self) -> dict[ActorId, str]:
        return {actor: self._node_of(actor) for actor in all_actors(self._actors)}

    def _node_of(self, actor: ActorId) -> str:
        return self._actors.spec_of(actor).node_id or self._view.own_id

    def _reaches(self, node: str) -> bool:
        if node == self._view.own_id:
            return True
        if self._clock() - self._silent.get(node, -BELIEVED_S) < BELIEVED_S:
            return False
        found = node in self._view.alive() and self._view.answers(node)
        if not found:
            self._silent[node] = self._clock()
        return found

    def _add(self, facts: NodeFacts) -> None:
        """A node that has joined: what it can take, after what it needs once."""
        (seat, *_), (budget, *_) = make_seats([replace(facts, driver=False)], ClusterWishes(seats=1))
        once_bytes = sum(self._run.costs.node_parts(replace(seat, driver=False)).values())
        self._facts[facts.node_id] = facts
        self._budget[facts.node_id] = budget - once_bytes
        self._once[facts.node_id] = once_bytes

    def _free(self, node: str, declared_bytes: int | None) -> int:
        """Of the node's budget, no more than the cluster still gives there (None: it does not say)."""
        if declared_bytes is None:
            return self._budget[node]
        return min(self._budget[node], declared_bytes - self._once.get(node, 0))

    def _room(self, facts: NodeFacts, free_bytes: int) -> Room:
        tape = _tape(facts, self._run.placement.chunk_bytes) is not None
        return Room(facts.node_id, facts.name, free_bytes, max(1, facts.threads), facts.layers, facts.top, tape)

    def _part(self, actor: ActorId) -> LostPart:
        spec = self._actors.spec_of(actor)
        return lost_part(actor, spec, self._run.costs.config, self._actors.num_stages, self._actors.num_shards > 0)

    def _spec(self, move: Move, dealt: DealtCores) -> Spec:
        """What an actor is loaded with on its new node."""
        spec, facts = self._actors.spec_of(move.actor), self._facts[move.node_id]
        moved = replace(
            spec,
            checkpoint=model_on(spec.checkpoint, facts),
            threads=dealt.threads,
            cores=dealt.cores,
            cache_slots=None if spec.cache_slots is None and not move.slots else move.slots,
            node_id=move.node_id,
            numa=dealt.numa,
            numa_bytes=None,  # memory there is preferred: others have taken theirs, nobody knows what they still will
            memory_bytes=move.planned_bytes,
        )
        if not isinstance(moved, StageSpec):
            return moved
        folder = _tape(facts, self._run.placement.chunk_bytes)
        if folder is None or move.pinned_chunks is None:
            return replace(moved, tape=None)
        return replace(moved, tape=TapeSpec(folder, move.pinned_chunks, move.ring_chunks))


def _tape(node: NodeFacts, chunk_bytes: int) -> Path | None:
    """The folder of the node's tape, where it is cut like the one that was planned for."""
    sound = (tape for tape in node.tapes if not tape.problem and tape.chunk_bytes == chunk_bytes)
    return next((Path(tape.path) for tape in sound), None)
