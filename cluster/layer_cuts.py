"""Which layers each stage gets: of all contiguous cuts the one after which a token reads least, then the most even one.

Exact: every run of layers is tried on every seat (dynamic programming), with the arithmetic of the memory budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from k3ray.cluster.budget_plan import gigabytes
from k3ray.cluster.memory_parts import expert_bytes
from k3ray.cluster.seat_costs import LayerCosts
from k3ray.cluster.seats import PlacementFailure, Seat
from k3ray.workers.counted import counted
from k3ray.workers.expert_reader import expert_slot_bytes

Cost = tuple[int, float]


@dataclass(frozen=True, slots=True)
class SeatUse:
    """What sits on a seat. stage_threads: None where no stage does; alone: it is the only one. shard: whether one does.
    remote: the experts are in shards, here or elsewhere.
    """

    seat: Seat
    stage_threads: int | None
    shard: bool
    remote: bool
    alone: bool


@dataclass(frozen=True, slots=True)
class Division:
    """The memory of a seat divided: chunks of trunk that stay, room for experts. streamed_bytes: read a step."""

    first: int
    stop: int
    pinned_chunks: int
    expert_bytes: int
    streamed_bytes: int


class SeatDivider:
    """Divides seats' memory between the trunk of given layers and experts; trunk first, as on one host (budget.py)."""

    def __init__(self, costs: LayerCosts) -> None:
        config = costs.config
        self.costs = costs
        self.slot_bytes = expert_slot_bytes(config)
        self.all_experts = len(config.moe_layers) * config.num_experts

    def fixed_bytes(self, use: SeatUse, first: int, stop: int) -> int:
        """What is needed whatever the budget, without trunk and slots; no stage where first == stop."""
        return sum(sum(parts.values()) for parts in self.fixed_parts(use, first, stop))

    def fixed_parts(self, use: SeatUse, first: int, stop: int) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
        """(the node's, the stage's, the shard's) by what they are for."""
        stage: dict[str, int] = {}
        if first < stop:
            assert use.stage_threads is not None
            stage = self.costs.stage_parts(first, stop, use.stage_threads, use.remote, use.alone)
        return self.costs.node_parts(use.seat), stage, self.costs.shard_parts() if use.shard else {}

    def owned(self, use: SeatUse, first: int, stop: int) -> int:
        """How many experts the seat may own."""
        if use.remote:
            return self.all_experts if use.shard else 0
        return sum(self.costs.config.is_moe(layer) for layer in range(first, stop)) * self.costs.config.num_experts

    def divide(self, use: SeatUse, first: int, stop: int) -> Division | None:
        """The division for these layers; None where they do not fit."""
        owned = self.owned(use, first, stop)
        floor = min(owned, self.costs.config.num_experts_per_token) * self.slot_bytes
        most = owned * self.slot_bytes
        room = use.seat.budget_bytes - self.fixed_bytes(use, first, stop) - floor
        if room < 0:
            return None
        if first == stop:
            return Division(first, stop, 0, min(most, floor + room), 0)
        pinned = self.costs.pinned_chunks(first, stop, room)
        if pinned is None:
            return None
        streamed = self.costs.streamed_bytes(first, stop, pinned)
        if streamed and not use.seat.streams:
            return None
        extra = 0 if streamed else room - self.costs.trunk_memory(first, stop, pinned)
        return Division(first, stop, pinned, min(most, floor + extra), streamed)

    def token_bytes(self, divisions: Sequence[Division]) -> int:
        """What a token reads, times `scale`. The experts that are not held count in bytes, not in whole slots: then
        no cut is better than another for what is left over on a seat.
        """
        room = sum(division.expert_bytes for division in divisions)
        missing = max(0, self.all_experts * self.slot_bytes - room)
        return sum(division.streamed_bytes for division in divisions) * self.scale + missing * self.missing_worth

    @property
    def scale(self) -> int:
        """What bytes are multiplied by so that all costs are whole numbers."""
        return self.costs.config.num_experts * self.slot_bytes

    @property
    def missing_worth(self) -> int:
        """What a token reads, times `scale`, for a byte of expert slots that is missing, where it is routed evenly."""
        return self.costs.config.num_experts_per_token * expert_bytes(self.costs.config)


def cut_layers(divider: SeatDivider, uses: Sequence[SeatUse]) -> list[Division]:
    """The divisions of the seats that get a stage, in their order; raises PlacementFailure with the arithmetic."""
    found = _best_cuts(divider, uses, divider.missing_worth)
    if found is None:
        raise _refusal(divider, uses)
    if sum(division.expert_bytes for division in found) > divider.all_experts * divider.slot_bytes:
        # more room than experts: what nobody needs must not have decided
        other = _best_cuts(divider, uses, 0)
        assert other is not None
        return min((other, found), key=divider.token_bytes)
    return found


def _best_cuts(divider: SeatDivider, uses: Sequence[SeatUse], room_worth: int) -> list[Division] | None:
    """The cuts that read least, where a byte of room for experts saves `room_worth`; None where none fits."""
    layers = divider.costs.config.num_hidden_layers
    tables: dict[tuple[SeatUse, int, bool], list[tuple[Cost, Division]]] = {}
    best: list[tuple[Cost, tuple[Division, ...]] | None] = [((0, 0.0), ()), *[None] * layers]
    for number, use in enumerate(uses, 1):
        kind = replace(use, seat=replace(use.seat, node=0, numa=None, cores=()))
        after: list[tuple[Cost, tuple[Division, ...]] | None] = [None] * (layers + 1)
        for first, before in enumerate(best[:-1]):
            if before is None:
                continue
            key = (kind, first, number == len(uses))
            if key not in tables:
                tables[key] = list(_runs(divider, kind, first, room_worth, number == len(uses)))
            for cost, division in tables[key]:
                total = (before[0][0] + cost[0], before[0][1] + cost[1])
                known = after[division.stop]
                if known is None or total < known[0]:
                    after[division.stop] = (total, (*before[1], division))
        best = after
    return None if best[-1] is None else list(best[-1][1])


def _runs(
    divider: SeatDivider, use: SeatUse, first: int, room_worth: int, to_the_end: bool
) -> Iterator[tuple[Cost, Division]]:
    """((bytes a token reads, unevenness), division) of every run of layers from `first` that the seat can have.

    to_the_end: only the one that ends with the last layer.
    """
    layers, seat = divider.costs.config.num_hidden_layers, use.seat
    for stop in range(first + 1, layers + 1):
        if stop - 1 not in seat.layers:
            return
        if ((first == 0 or stop == layers) and not seat.top) or (to_the_end and stop < layers):
            continue
        division = divider.divide(use, first, stop)
        if division is None:
            continue
        trunk = divider.costs.trunk_bytes(first, stop)
        owned = 0 if use.remote else divider.owned(use, first, stop)
        missing = owned * divider.slot_bytes - division.expert_bytes
        read = division.streamed_bytes * divider.scale + missing * room_worth
        yield (read, trunk * trunk / seat.budget_bytes), division


def _refusal(divider: SeatDivider, uses: Sequence[SeatUse]) -> PlacementFailure:
    """Why no cut fits: what one layer needs at each seat and how many layers it could have."""
    layers, lines, room = divider.costs.config.num_hidden_layers, [], 0
    for use in uses:
        found = [division for first in range(layers) for _, division in _runs(divider, use, first, 0, False)]
        most = max((division.stop - division.first for division in found), default=0)
        room += most
        line = f"node {use.seat.node + 1}: {gigabytes(use.seat.budget_bytes)}, at most {counted(most, 'layer')}"
        if not most and use.seat.layers:
            node, stage, shard = divider.fixed_parts(use, min(use.seat.layers), min(use.seat.layers) + 1)
            floor = divider.costs.config.num_experts_per_token * divider.slot_bytes
            parts = {"what the node has once": sum(node.values()), "a stage of one layer": sum(stage.values()),
                     "a shard": sum(shard.values()), "slots of one token's experts": floor}  # fmt: skip
            line += ": it needs " + ", ".join(f"{name} {gigabytes(size)}" for name, size in parts.items() if size)
            line += " and the tape's ring"
        if not use.seat.streams:
            line += "; it has no tape, so that all of a stage's trunk has to stay in its memory"
        lines.append(line)
    why = "together too few" if room < layers else "and no cut into contiguous runs fits them all"
    listed = "".join(f"\n  {line}" for line in lines[:20])
    return PlacementFailure(
        f"the cluster does not hold the {layers} layers: {why}:{listed}\ngive the nodes more memory, add nodes, ask "
        "for fewer --positions or --stages, or put the missing layers on their disks"
    )
