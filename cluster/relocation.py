"""Where lost actors go when their node is gone: a pure function of what they need and of what other nodes have free.

Only the lost ones move. A part may come out smaller than the plan had made it (fewer pinned chunks, fewer expert
slots), never a node fuller than its budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from k3ray.cluster.actor_calls import ActorId, ActorLost
from k3ray.cluster.budget_plan import gigabytes
from k3ray.cluster.seat_costs import LayerCosts
from k3ray.workers.expert_reader import expert_slot_bytes

MAX_TRIES = 100_000  # of placing one part on one node; the parts of a node are few


class NoRoom(ActorLost):
    """Lost actors that no node which is left can take; the message has the arithmetic."""


@dataclass(frozen=True, slots=True)
class LostPart:
    """What a lost actor had. first..stop-1: a stage's layers, both 0 of a shard.

    disk_layers: those whose tensors have to be on the new node's disks; top: embedding or head as well. owned: how many
    experts are its own. pinned_chunks: of its tape, None where it held all its matrices; slots: of its cache.
    remote: the experts of its layers are in shards; alone: it has all layers. barred: nodes where it would not reach
    those that it works with.
    """

    actor: ActorId
    first: int
    stop: int
    threads: int
    disk_layers: frozenset[int]
    top: bool
    owned: int
    slots: int
    pinned_chunks: int | None
    remote: bool = True
    alone: bool = False
    barred: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Room:
    """What a node that lives can take. free_bytes: of its budget, after all that is planned for it."""

    node_id: str
    name: str
    free_bytes: int
    threads: int
    layers: frozenset[int]
    top: bool
    tape: bool


@dataclass(frozen=True, slots=True)
class Move:
    """Where one actor goes and what it may hold there.

    pinned_chunks: None: its matrices are read whole from the shards, as the node has no tape.
    """

    actor: ActorId
    node_id: str
    threads: int
    pinned_chunks: int | None
    ring_chunks: int
    slots: int
    planned_bytes: int


@dataclass(frozen=True, slots=True)
class PartCosts:
    """The bytes of parts, by the arithmetic of the plan."""

    costs: LayerCosts

    @property
    def slot_bytes(self) -> int:
        """Of one expert's slot."""
        return expert_slot_bytes(self.costs.config)

    def fixed(self, part: LostPart, threads: int) -> Mapping[str, int]:
        """What is needed whatever the room, by what it is for."""
        if part.actor.kind == "shard":
            return self.costs.shard_parts()
        return self.costs.stage_parts(part.first, part.stop, threads, part.remote, part.alone)

    def least(self, part: LostPart, room: Room) -> Mapping[str, int]:
        """The least that the part takes there, by what it is for."""
        found = dict(self.fixed(part, min(part.threads, room.threads)))
        if part.actor.kind == "stage":
            found["trunk"] = self.trunk(part, 0 if room.tape else None)
        slots = min(part.owned, part.slots, self.costs.config.num_experts_per_token)
        if slots:
            found["expert slots"] = slots * self.slot_bytes
        return found

    def trunk(self, part: LostPart, pinned: int | None) -> int:
        """What is mapped for a stage's matrices with so many chunks pinned; None: all of them."""
        return self.costs.trunk_memory(part.first, part.stop, self.all_chunks(part) if pinned is None else pinned)

    def all_chunks(self, part: LostPart) -> int:
        """How many chunks the stage's part of a tape has."""
        return self.costs.all_chunks(part.first, part.stop)


def relocate(parts: Sequence[LostPart], rooms: Sequence[Room], costs: LayerCosts) -> dict[ActorId, Move]:
    """Decide where every lost part goes; NoRoom where they cannot all go anywhere.

    The parts that need most are placed first, each on the node that has most room; then every node's room is shared
    out, the trunk first, at most up to what the plan had given. The same input gives the same answer.
    """
    model = PartCosts(costs)
    order = sorted(parts, key=lambda part: (-_weight(model, part), part.actor))
    tries = _Tries(MAX_TRIES)
    homes = _assign(model, order, tuple(rooms), tries)
    if homes is None:
        raise NoRoom(_refusal(model, order, rooms))
    moves: dict[ActorId, Move] = {}
    for room in rooms:
        mine = sorted((part for part in parts if homes[part.actor] == room.node_id), key=_trunk_first)
        moves |= {move.actor: move for move in _fill(model, mine, room)}
    return moves


@dataclass(slots=True)
class _Tries:
    left: int


def _weight(model: PartCosts, part: LostPart) -> int:
    """What the part had, about: the largest are placed first."""
    trunk = model.trunk(part, part.pinned_chunks) if part.actor.kind == "stage" else 0
    return sum(model.fixed(part, part.threads).values()) + trunk + part.slots * model.slot_bytes


def _trunk_first(part: LostPart) -> tuple[bool, ActorId]:
    return part.actor.kind == "shard", part.actor


def _assign(
    model: PartCosts, parts: Sequence[LostPart], rooms: tuple[Room, ...], tries: _Tries
) -> dict[ActorId, str] | None:
    """A node for every part so that all of them have the least that they need; None where there is no such way."""
    if not parts:
        return {}
    for place, least in _places(model, parts, rooms):
        tries.left -= 1
        if tries.left < 0:
            return None
        room = rooms[place]
        after = (*rooms[:place], replace(room, free_bytes=room.free_bytes - least), *rooms[place + 1 :])
        rest = _assign(model, parts[1:], after, tries)
        if rest is not None:
            return {parts[0].actor: room.node_id, **rest}
    return None


def _places(model: PartCosts, parts: Sequence[LostPart], rooms: Sequence[Room]) -> Iterator[tuple[int, int]]:
    """(the room's number, the least bytes there) of the rooms that can take the first part, the emptiest first.

    Of rooms that are alike in everything but their name, to all the parts, only the first is tried.
    """
    part, tried = parts[0], set()
    for place in sorted(range(len(rooms)), key=lambda number: (-rooms[number].free_bytes, number)):
        room = rooms[place]
        kind = replace(room, node_id="", name=""), tuple(room.node_id in one.barred for one in parts)
        if kind in tried or not _sees(part, room):
            continue
        tried.add(kind)
        least = sum(model.least(part, room).values())
        if least <= room.free_bytes:
            yield place, least


def _sees(part: LostPart, room: Room) -> bool:
    return part.disk_layers <= room.layers and (room.top or not part.top) and room.node_id not in part.barred


def _fill(model: PartCosts, parts: Sequence[LostPart], room: Room) -> Iterator[Move]:
    """Share a node's room out over the parts that come to it."""
    least = {part.actor: sum(model.least(part, room).values()) for part in parts}
    left = room.free_bytes - sum(least.values())
    for part in parts:
        move = _grown(model, part, room, left, least[part.actor])
        left -= move.planned_bytes - least[part.actor]
        yield move


def _grown(model: PartCosts, part: LostPart, room: Room, left: int, least: int) -> Move:
    """The part with as much of what it had as `left` bytes above its least allow."""
    threads, pinned, ring, planned = min(part.threads, room.threads), None, 0, least
    if part.actor.kind == "stage" and room.tape:
        base = model.trunk(part, 0)
        wanted = model.all_chunks(part) if part.pinned_chunks is None else part.pinned_chunks
        pinned = next((count for count in range(wanted, 0, -1) if model.trunk(part, count) <= base + left), 0)
        grown = model.trunk(part, pinned) - base
        planned, left = planned + grown, left - grown
        ring = model.costs.ring_chunks(part.first, part.stop, pinned)
    slots = min(part.owned, part.slots, model.costs.config.num_experts_per_token)
    more = min(min(part.owned, part.slots) - slots, max(0, left) // model.slot_bytes)
    return Move(part.actor, room.node_id, threads, pinned, ring, slots + more, planned + more * model.slot_bytes)


def _refusal(model: PartCosts, parts: Sequence[LostPart], rooms: Sequence[Room]) -> str:
    return (
        "the lost actors do not all fit on the nodes that are left: "
        + " | ".join(f"{_named(part)}: {_why_not(model, part, rooms)}" for part in parts)
        + "; add a node to the cluster, or start again with what there is"
    )


def _named(part: LostPart) -> str:
    return f"{part.actor}, layers {part.first}..{part.stop - 1}" if part.actor.kind == "stage" else str(part.actor)


def _why_not(model: PartCosts, part: LostPart, rooms: Sequence[Room]) -> str:
    found = []
    for room in rooms:
        if room.node_id in part.barred:
            found.append(f"{room.name} does not reach those that it works with")
            continue
        if not _sees(part, room):
            found.append(f"{room.name} does not have that part of the model on its disks")
            continue
        needs = {what: nbytes for what, nbytes in model.least(part, room).items() if nbytes}
        listed = ", ".join(f"{what} {gigabytes(nbytes)}" for what, nbytes in needs.items())
        found.append(
            f"{room.name} has {gigabytes(room.free_bytes)} of its budget free, and at least "
            f"{gigabytes(sum(needs.values()))} are needed there ({listed})"
        )
    return "; ".join(found) or "no node is left"
