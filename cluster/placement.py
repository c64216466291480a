"""From a model, the nodes' facts and the wishes to a placement: which actor sits where, with what of the model.

A pure function: the same input gives the same placement, and more memory never makes a token read more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from k3ray.cluster.budget_plan import ActorBudget
from k3ray.cluster.expert_shares import share_experts
from k3ray.cluster.layer_cuts import Division, SeatDivider, SeatUse, cut_layers
from k3ray.cluster.part_budgets import shard_budget, stage_budget
from k3ray.cluster.prediction import ActorShare, Prediction, predict, stage_thread_share
from k3ray.cluster.seat_costs import LayerCosts
from k3ray.cluster.seats import ClusterWishes, PlacementFailure, Seat, choose_seats, make_seats, shard_seats
from k3ray.cluster.topology import NodeFacts
from k3ray.workers.expert_owners import ExpertGroup
from k3ray.workers.model.config import ModelConfig
from k3ray.workers.tape.layout import TapeLayout

FEW_LISTED = 12


@dataclass(frozen=True, slots=True)
class NodePlacement:
    """One node. budget_bytes: for all its processes. parts: what is there once, by what it is for."""

    node_id: str
    name: str
    address: str
    budget_bytes: int
    parts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ActorPlacement:
    """One actor. node: its number; numa: the memory node to bind to, if any. first..stop-1: a stage's layers, both 0
    for a shard.
    """

    node: int
    numa: int | None
    threads: int
    cores: tuple[int, ...]
    first: int
    stop: int
    budget: ActorBudget


@dataclass(frozen=True, slots=True)
class Placement:
    """All actors of a cluster. experts: how the shards share them, empty where the stages own their layers'.

    positions: that every stage has room for. chunk_bytes: of the tape that it is planned for.
    """

    positions: int
    chunk_bytes: int
    num_layers: int
    num_experts: int
    nodes: tuple[NodePlacement, ...]
    stages: tuple[ActorPlacement, ...]
    shards: tuple[ActorPlacement, ...]
    experts: tuple[ExpertGroup, ...]
    prediction: Prediction

    def actors_of(self, node: int) -> list[ActorPlacement]:
        """The actors of a node, stages first."""
        return [actor for actor in (*self.stages, *self.shards) if actor.node == node]

    def node_bytes(self, node: int) -> int:
        """Everything that is planned for a node."""
        actors = sum(actor.budget.total_bytes for actor in self.actors_of(node))
        return sum(self.nodes[node].parts.values()) + actors


def place(
    config: ModelConfig,
    layout: TapeLayout,
    nodes: Sequence[NodeFacts],
    wishes: ClusterWishes,
    costs: LayerCosts | None = None,
) -> Placement:
    """Place the model on the nodes; PlacementFailure, with the arithmetic, where it cannot be.

    costs: those of this config, layout and number of positions, where they were made before.
    """
    costs = costs or LayerCosts(config, layout, wishes.positions)
    seats, budgets = make_seats(nodes, wishes)
    staged = choose_seats(seats, wishes.stages, "--stages", 1, config.num_hidden_layers)
    sharded = shard_seats(seats, wishes)
    uses = _uses(costs, seats, staged, sharded)
    divider = SeatDivider(costs)
    divisions = _divide(divider, uses, staged)
    groups = _share(divider, uses, divisions, sharded)
    stages = [_stage(divider, uses[place], divisions[place]) for place in staged]
    shards = [
        _shard(divider, uses[place], divisions[place], number, groups, len(sharded))
        for number, place in enumerate(sharded)
    ]
    parts: list[dict[str, int]] = [{} for _ in nodes]
    for seat in seats:
        parts[seat.node] |= costs.node_parts(seat)
    return Placement(
        positions=wishes.positions,
        chunk_bytes=layout.chunk_bytes,
        num_layers=config.num_hidden_layers,
        num_experts=config.num_experts,
        nodes=tuple(
            NodePlacement(node.node_id, node.name, node.address, budget, mine)
            for node, budget, mine in zip(nodes, budgets, parts, strict=True)
        ),
        stages=tuple(stages),
        shards=tuple(shards),
        experts=groups,
        prediction=predict(
            costs,
            [ActorShare(seats[place], stage.threads, divisions[place], stage.budget)
             for place, stage in zip(staged, stages, strict=True)],
            [ActorShare(seats[place], shard.threads, divisions[place], shard.budget)
             for place, shard in zip(sharded, shards, strict=True)],
            groups,
        ),
    )  # fmt: skip


def _uses(costs: LayerCosts, seats: Sequence[Seat], staged: Sequence[int], sharded: Sequence[int]) -> list[SeatUse]:
    """What sits on every seat; a seat's threads are shared between its stage and its shard."""
    share = stage_thread_share(costs, seats, len(sharded))
    uses = []
    for place, seat in enumerate(seats):
        threads = None
        if place in staged:
            both = place in sharded and seat.threads > 1
            threads = min(max(1, round(seat.threads * share)), seat.threads - 1) if both else seat.threads
        uses.append(SeatUse(seat, threads, place in sharded, bool(sharded), len(staged) == 1))
    return uses


def _divide(divider: SeatDivider, uses: Sequence[SeatUse], staged: Sequence[int]) -> list[Division]:
    """The memory of every seat divided."""
    cuts = dict(zip(staged, cut_layers(divider, [uses[place] for place in staged]), strict=True))
    divisions = []
    for place, use in enumerate(uses):
        division = cuts.get(place) or divider.divide(use, 0, 0)
        if division is None:
            raise PlacementFailure(
                f"node {use.seat.node + 1}: {use.seat.budget_bytes:,} bytes are fewer than the "
                f"{divider.fixed_bytes(use, 0, 0):,} that its processes need before any expert; leave the node out"
            )
        divisions.append(division)
    return divisions


def _share(
    divider: SeatDivider, uses: Sequence[SeatUse], divisions: Sequence[Division], sharded: Sequence[int]
) -> tuple[ExpertGroup, ...]:
    """The experts of all layers over the shards; refuses layers whose experts no shard's node has."""
    if not sharded:
        return ()
    config, seats = divider.costs.config, [uses[place].seat for place in sharded]
    groups = share_experts(
        config.moe_layers,
        config.num_experts,
        [seat.layers for seat in seats],
        [divisions[place].expert_bytes // divider.slot_bytes for place in sharded],
        _weights([seat.speeds.disk_experts for seat in seats], [1 / seat.disk_sharers for seat in seats]),
        _weights([seat.speeds.experts for seat in seats], [1.0] * len(seats)),
    )
    missing = sorted(set(config.moe_layers) - {layer for group in groups for layer in group.layers})
    if missing:
        raise PlacementFailure(
            f"the experts of the layers {', '.join(map(str, missing[:FEW_LISTED]))} ({len(missing)} in all) are on no "
            "disk of a node with a shard: copy them to one, or give one that has them a shard"
        )
    return groups


def _weights(rates: Sequence[float | None], shares: Sequence[float]) -> list[float]:
    """The speeds, all alike where one of them is not known."""
    if any(rate is None for rate in rates):
        return list(shares)
    return [(rate or 0.0) * share for rate, share in zip(rates, shares, strict=True)]


def _stage(divider: SeatDivider, use: SeatUse, division: Division) -> ActorPlacement:
    assert use.stage_threads is not None
    slots = 0 if use.remote else division.expert_bytes // divider.slot_bytes
    run = range(division.first, division.stop)
    budget = stage_budget(divider.costs, run, use.stage_threads, use.remote, division.pinned_chunks, slots)
    seat, threads = use.seat, use.stage_threads
    return ActorPlacement(seat.node, seat.numa, threads, seat.cores[:threads], run.start, run.stop, budget)


def _shard(
    divider: SeatDivider,
    use: SeatUse,
    division: Division,
    number: int,
    groups: Sequence[ExpertGroup],
    num_shards: int,
) -> ActorPlacement:
    owned = sum(group.counts[number] for group in groups)
    slots = min(division.expert_bytes // divider.slot_bytes, owned)
    budget = shard_budget(divider.costs, number, num_shards, owned, slots)
    seat, taken = use.seat, use.stage_threads or 0
    threads = max(1, seat.threads - taken)
    cores = seat.cores[taken:] or seat.cores[:threads]
    return ActorPlacement(seat.node, seat.numa, threads, cores, 0, 0, budget)
