"""Which cores actors get on the node that they move to: those that the run uses least there, of one memory node.

Pure. How much memory they may take there is relocation.py's; no bit depends on either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from k3ray.cluster.actor_calls import ActorId
from k3ray.cluster.homes import Spec
from k3ray.cluster.relocation import Move
from k3ray.cluster.seats import ClusterWishes, Seat, make_seats
from k3ray.cluster.topology import NodeFacts


@dataclass(frozen=True, slots=True)
class DealtCores:
    """How many threads an actor has and on which cores; numa: the memory node that these are of, None: unbound."""

    threads: int
    cores: tuple[int, ...]
    numa: int | None


def cores_of_moves(
    moves: Mapping[ActorId, Move], facts_of: Mapping[str, NodeFacts], specs: Mapping[ActorId, Spec]
) -> dict[ActorId, DealtCores]:
    """Deal cores to all actors that move. facts_of: of nodes by their ids; specs: what every actor was loaded with."""
    dealt: dict[ActorId, DealtCores] = {}
    for node in dict.fromkeys(move.node_id for move in moves.values()):
        there = [spec for actor, spec in specs.items() if spec.node_id == node and actor not in moves]
        dealt |= deal_cores(facts_of[node], there, [move for move in moves.values() if move.node_id == node])
    return dealt


def deal_cores(facts: NodeFacts, there: Sequence[Spec], moves: Sequence[Move]) -> dict[ActorId, DealtCores]:
    """Deal a node's cores to all actors that move there together. there: what lives on it already.

    The actor with most threads comes first. On a node whose actors are bound to its memory nodes, or that has several
    and no actor yet, each is bound to one: where its memory is planned to have room if there is such a one, with as
    many threads as can be, on the cores that the fewest actors have. The same input gives the same answer.
    """
    seats, uses = _seats(facts, there), Counter(core for spec in there for core in spec.cores)
    free = {seat.numa: seat.budget_bytes - _bound_bytes(there, seat.numa) for seat in seats}
    dealt: dict[ActorId, DealtCores] = {}
    for move in sorted(moves, key=lambda move: (-move.threads, move.actor)):
        fitting = [seat for seat in seats if free[seat.numa] >= move.planned_bytes] or seats
        offers = [(_offer(seat, move.threads, uses), -free[seat.numa]) for seat in fitting]
        best, _ = min(offers, key=lambda offer: (-offer[0].threads, _used(offer[0], uses), offer[1]))
        dealt[move.actor] = best
        uses.update(best.cores)
        free[best.numa] -= move.planned_bytes
    return dealt


def _seats(facts: NodeFacts, there: Sequence[Spec]) -> Sequence[Seat]:
    """The node's places as the planner cuts them: one for each memory node, or one where its actors are not bound."""
    whole = any(spec.numa is None for spec in there)
    seats, _ = make_seats([replace(facts, driver=False)], ClusterWishes(seats=1 if whole else None))
    return seats


def _bound_bytes(there: Sequence[Spec], numa: int | None) -> int:
    return sum(spec.memory_bytes or 0 for spec in there if spec.numa == numa)


def _offer(seat: Seat, threads: int, uses: Mapping[int, int]) -> DealtCores:
    """What a place has for an actor: its least used cores, the first ones among equals, in the place's order."""
    taken = min(threads, seat.threads)
    chosen = sorted(seat.cores, key=lambda core: uses.get(core, 0))[:taken]  # sorted() keeps the order of equals
    return DealtCores(taken, tuple(core for core in seat.cores if core in chosen), seat.numa)


def _used(offer: DealtCores, uses: Mapping[int, int]) -> int:
    return sum(uses.get(core, 0) for core in offer.cores)
