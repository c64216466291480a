"""Seats: the places on which the actors of a cluster sit, with their cores, their memory and their share of the speeds.

A node has one seat for each of its memory nodes, or as many as are asked for. A seat has at most one stage and at most
one shard. Pure: knows nothing of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from k3ray.cluster.budget_plan import gigabytes
from k3ray.cluster.plan import MAX_SHARDS
from k3ray.cluster.presets import AVAILABLE_SHARE, PRESETS
from k3ray.cluster.topology import NodeFacts, NodeSpeeds
from k3ray.cluster.wishes import AUTO
from k3ray.workers.failure import Failure

MAX_SEATS = 64  # of one node
MAX_POSITIONS = 1 << 24


class PlacementFailure(Failure):
    """A cluster that cannot hold the model, or wishes that no placement meets; the message has the arithmetic."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class ClusterWishes:
    """What is asked of a placement; None: as the planner thinks best.

    stages, shards: of the whole cluster; shards 0: the experts live in the stages. seats: of every node. memory_bytes:
    of every node, or a preset's name. positions: prompt and generated tokens of the one sequence. packed: plan as if
    every node had a tape; else a stage on a node without one holds all of its trunk.
    """

    stages: int | None = None
    shards: int | None = None
    seats: int | None = None
    memory_bytes: int | None = None
    preset: str | None = None
    positions: int = 4096
    packed: bool = True


@dataclass(frozen=True, slots=True)
class Seat:
    """One place. node: its number; numa: the memory node that it is bound to, None where the node has one or is cut.

    speeds: of all its threads, its share of the node's memory bandwidth; the disks, the network and the speeds of fewer
    threads are the node's.
    disk_sharers: how many seats of the node use its disks. opens_node: pays for what a node has once. driver: the
    command runs on this node. layers: those that the node's disks hold; top: also embedding and head. streams: there
    is a tape to stream trunk from. node_threads: of all seats of the node.
    """

    node: int
    numa: int | None
    cores: tuple[int, ...]
    threads: int
    budget_bytes: int
    speeds: NodeSpeeds
    disk_sharers: int
    opens_node: bool
    driver: bool
    layers: frozenset[int]
    top: bool
    streams: bool = True
    node_threads: int = 0

    @property
    def carries_driver(self) -> bool:
        """Whether the driver's memory is taken from this seat."""
        return self.driver and self.opens_node


def make_seats(nodes: Sequence[NodeFacts], wishes: ClusterWishes) -> tuple[tuple[Seat, ...], tuple[int, ...]]:
    """Cut the nodes into seats; returns them and every node's budget in bytes. Raises PlacementFailure."""
    if not nodes:
        raise PlacementFailure("no node can take part: see `k3ray nodes`")
    _check("--positions", wishes.positions, 1, MAX_POSITIONS)
    if wishes.seats is not None:
        _check("--seats", wishes.seats, 1, MAX_SEATS)
    budgets = tuple(_budget(node, wishes) for node in nodes)
    seats: list[Seat] = []
    has_driver = any(node.driver for node in nodes)
    for number, (node, budget) in enumerate(zip(nodes, budgets, strict=True)):
        carries = node.driver or (not has_driver and number == 0)
        seats += _seats_of(number, node, budget, wishes.seats, carries, wishes.packed or bool(node.tapes))
    return tuple(seats), budgets


def choose_seats(seats: Sequence[Seat], count: int | None, what: str, least: int, most: int) -> tuple[int, ...]:
    """The numbers of the `count` seats with most memory (all of them, at most `most`, where None), in their order."""
    if count is None:
        count = min(len(seats), most)
    _check(what, count, least, min(most, len(seats)), f"{len(seats)} places, one each; --seats makes more of a node")
    by_memory = sorted(range(len(seats)), key=lambda number: (-seats[number].budget_bytes, number))
    return tuple(sorted(by_memory[:count]))


def shard_seats(seats: Sequence[Seat], wishes: ClusterWishes) -> tuple[int, ...]:
    """The seats that get a shard: all where there are several, none where there is one, unless told."""
    if wishes.shards is None:
        return tuple(range(len(seats))) if len(seats) > 1 else ()
    return choose_seats(seats, wishes.shards, "--expert-shards", 0, MAX_SHARDS)


def _budget(node: NodeFacts, wishes: ClusterWishes) -> int:
    """The bytes that all processes of a node may take."""
    available = node.available_bytes
    asked, said = wishes.memory_bytes, "--memory"
    if asked is None and wishes.preset not in (None, AUTO):
        preset = PRESETS.get(str(wishes.preset))
        if wishes.preset == "max":
            return available
        if preset is None or preset.total_bytes is None:
            known = ", ".join(name for name, row in PRESETS.items() if row.total_bytes) + ", max, auto"
            raise PlacementFailure(f"--preset: found {wishes.preset!r}, expected one of {known} for a cluster")
        asked, said = preset.total_bytes, f"--preset {wishes.preset}"
    if asked is None:
        return int(AVAILABLE_SHARE * available)
    if asked > available:
        raise PlacementFailure(
            f"node {node.name}: {said} asks for {gigabytes(asked)} and {gigabytes(available)} are available there "
            f"({node.decided_by}): ask for less, or for --preset auto"
        )
    return asked


def _seats_of(number: int, node: NodeFacts, budget: int, asked: int | None, driver: bool, streams: bool) -> list[Seat]:
    by_numa = [place for place in node.numa if place.cores]
    count = asked or max(1, len(by_numa))
    parts: list[tuple[int | None, tuple[int, ...], int]]
    if count == len(by_numa) and count > 1:
        whole = sum(place.memory_bytes for place in by_numa)
        parts = [(place.number, place.cores, budget * place.memory_bytes // max(1, whole)) for place in by_numa]
    else:
        cores, cut = node.cores, [len(node.cores) * place // count for place in range(count + 1)]
        parts = [(None, cores[cut[place] : cut[place + 1]], budget // count) for place in range(count)]
    threads = _share(max(1, node.threads), [max(1, len(cores)) for _, cores, _ in parts])
    return [
        Seat(
            number, numa, cores[: threads[place]], threads[place], nbytes,
            _of_seat(node.speeds, threads[place] / sum(threads)), count, place == 0, driver, node.layers, node.top,
            streams, sum(threads),
        )
        for place, (numa, cores, nbytes) in enumerate(parts)
    ]  # fmt: skip


def _share(threads: int, cores: Sequence[int]) -> list[int]:
    """The node's threads over its seats in proportion to their cores, at least one each."""
    whole, ends = sum(cores), [0]
    for count in cores:
        ends.append(ends[-1] + count)
    return [max(1, threads * ends[place + 1] // whole - threads * ends[place] // whole) for place in range(len(cores))]


def _of_seat(speeds: NodeSpeeds, share: float) -> NodeSpeeds:
    def part(rate: float | None) -> float | None:
        return None if rate is None else rate * share

    return replace(speeds, read=part(speeds.read), trunk=part(speeds.trunk), experts=part(speeds.experts))


def _check(what: str, found: int, low: int, high: int, why: str = "") -> None:
    if not low <= found <= high:
        raise PlacementFailure(f"{what}: found {found}, expected {low} to {high}{f': {why}' if why else ''}")
