"""A run on the nodes of a cluster: looked at anew and compared; a plan is made for them, or checked on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from k3ray.cluster.budget_plan import gigabytes
from k3ray.cluster.node_survey import survey
from k3ray.cluster.placed_budget import PlacedBudget
from k3ray.cluster.placed_plan import check_nodes, nodes_of, placed_plan
from k3ray.cluster.placement import Placement, place
from k3ray.cluster.plan import Plan
from k3ray.cluster.plan_file import read_plan
from k3ray.cluster.roots_file import Roots, RootsMap, read_roots
from k3ray.cluster.seats import ClusterWishes, PlacementFailure
from k3ray.cluster.topology import NodeFacts, Verdict, compare_nodes
from k3ray.cluster.wishes import Wishes
from k3ray.nodes import look_here
from k3ray.workers.counted import counted
from k3ray.workers.loading import CheckpointSpec
from k3ray.workers.model.config import ModelConfig
from k3ray.workers.process_report import versions
from k3ray.workers.tape.layout import TapeLayout, plan_layout

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ClusterWish:
    """What a run asks of several nodes. stages, shards: None: as the planner thinks best. memory: of each node.

    plan: from --plan, which leaves nothing to be asked for. roots: where each node has the model and the tape.
    """

    stages: int | None
    shards: int | None
    memory: Wishes
    plan: Placement | None
    roots: RootsMap
    roots_path: Path | None

    @property
    def forced(self) -> bool:
        """Whether even one host is to be placed: a plan was given, or folders by node."""
        return self.plan is not None or self.roots_path is not None


@dataclass(frozen=True, slots=True)
class Placed:
    """Where everything of a run is. nodes: the facts of the placement's nodes, in its order."""

    placement: Placement
    nodes: tuple[NodeFacts, ...]
    layout: TapeLayout
    plan: Plan

    @property
    def budget(self) -> PlacedBudget:
        """The memory that is planned."""
        return PlacedBudget(self.placement)

    @property
    def node_names(self) -> dict[str, str]:
        """By Ray's id."""
        return {node.node_id: node.name for node in self.nodes}

    @property
    def once_bytes(self) -> dict[str, int]:
        """What no actor takes on each node, the driver too, by Ray's id."""
        parts = zip(self.nodes, self.placement.nodes, strict=True)
        return {node.node_id: sum(planned.parts.values()) for node, planned in parts}


def cluster_wish(
    config: ModelConfig,
    model_dirs: Sequence[Path],
    tape: Path | None,
    stages: int | None,
    shards: int | None,
    memory: Wishes,
    plan: Path | None,
    roots: Path | None,
    layers: int | None = None,
) -> ClusterWish:
    """Read the plan and the roots; refuses what a plan says already. config: of the layers that are run, layers: what
    was asked of them.

    Raises PlanFileFailure, TomlFailure, PlacementFailure.
    """
    here = Roots(tuple(str(folder.resolve()) for folder in model_dirs), (str(tape.resolve()),) if tape else ())
    if plan is not None:
        given = {
            "--layers": layers,
            "--stages": stages,
            "--expert-shards": shards,
            memory.said: None if memory == Wishes() else 1,
        }
        names = [name for name, value in given.items() if value is not None]
        if names:
            raise PlacementFailure(
                f"--plan says how the model is shared out: leave {' and '.join(names)} out, or plan again with them"
            )
    placement = read_plan(plan, config) if plan is not None else None
    return ClusterWish(
        stages, shards, memory, placement, read_roots(roots, here) if roots else RootsMap((), here), roots
    )


def place_run(
    wish: ClusterWish,
    config: ModelConfig,
    checkpoint: CheckpointSpec,
    positions: int,
    threads: int,
    joined: bool,
    say: Say,
) -> Placed:
    """Look at every node, and check the plan on them, or make one.

    joined: this process is connected to a cluster; else this host is all there is. config: of the layers that are run;
    checkpoint: with the driver's config. positions: of the longest sequence.
    threads: of the node that this command runs on. Raises PlacementFailure with every reason.
    """
    if joined:
        facts = survey(wish.roots, threads, say=say)
    else:
        facts = [look_here(wish.roots, wish.roots_path, threads, measure=False)]
    verdicts = compare_nodes(facts, versions())
    if wish.plan is not None:
        placement, nodes = wish.plan, nodes_of(wish.plan, verdicts)
        check_nodes(placement, nodes)
        if positions > placement.positions:
            raise PlacementFailure(
                f"the plan has room for sequences of {placement.positions} positions, found {positions}: make it again "
                f"with `k3ray plan --positions {positions}`, or ask for fewer tokens"
            )
        layout = plan_layout(config, placement.chunk_bytes)
    else:
        usable = _usable(verdicts, say)
        layout = _layout(config, usable)
        placement, nodes = place_what_fits(config, layout, usable, _wishes(wish, positions), say)
        check_nodes(placement, nodes)
    return Placed(placement, tuple(nodes), layout, placed_plan(placement, nodes, checkpoint, joined))


def place_what_fits(
    config: ModelConfig, layout: TapeLayout, usable: Sequence[NodeFacts], wishes: ClusterWishes, say: Say
) -> tuple[Placement, list[NodeFacts]]:
    """Place the model, leaving out nodes while it does not go otherwise: those with least memory, or, where fewer are
    left out then, those with fewest layers on their disks; never this host.

    Raises what all nodes together were refused for, with what decides each one's memory.
    """
    try:
        return place(config, layout, usable, wishes), list(usable)
    except PlacementFailure as failure:
        refused = failure
    orders: list[Callable[[NodeFacts], int]] = [lambda node: 0]
    if len({(node.layers, node.top) for node in usable}) > 1:
        orders.append(lambda node: len(node.layers) + node.top)
    found = [one for order in orders if (one := _place_without(config, layout, usable, wishes, order)) is not None]
    if not found:
        available = (f"{node.name} {gigabytes(node.available_bytes)} ({node.decided_by})" for node in usable)
        raise PlacementFailure(f"{refused}\navailable: {'; '.join(available)}") from None
    placement, nodes = max(found, key=lambda one: len(one[1]))
    for node in usable:
        if node not in nodes:
            say(f"{node.name}: left out: {_why_too_small(node, config)}")
    return placement, nodes


def _place_without(
    config: ModelConfig,
    layout: TapeLayout,
    usable: Sequence[NodeFacts],
    wishes: ClusterWishes,
    order: Callable[[NodeFacts], int],
) -> tuple[Placement, list[NodeFacts]] | None:
    """Leave out one kind of nodes after the other, by the order and then by memory, until the model can be placed."""
    nodes = list(usable)
    while others := [node for node in nodes if not node.driver]:
        least = min(others, key=lambda node: (order(node), node.available_bytes))
        nodes = [node for node in nodes if node.driver or not _alike(node, least)]
        with suppress(PlacementFailure):
            return (place(config, layout, nodes, wishes), nodes) if nodes else None
    return None


def _why_too_small(node: NodeFacts, config: ModelConfig) -> str:
    if node.top and len(node.layers) == config.num_hidden_layers:
        return f"{gigabytes(node.available_bytes)} there are too few for a part of this model"
    return (
        f"{gigabytes(node.available_bytes)} and {counted(len(node.layers), 'layer')} whole on its disks make no part "
        "of a plan over these nodes: copy more of the model there"
    )


def _alike(node: NodeFacts, other: NodeFacts) -> bool:
    """Whether two nodes can have the same part of a model."""
    return (node.available_bytes, node.layers, node.top) == (other.available_bytes, other.layers, other.top)


def _usable(verdicts: Sequence[Verdict], say: Say) -> list[NodeFacts]:
    """The nodes that take part; says why others do not."""
    for verdict in verdicts:
        if not verdict.usable:
            say(f"{verdict.node.name}: left out: {'; '.join(verdict.reasons)}")
    usable = [verdict.node for verdict in verdicts if verdict.usable]
    if not usable:
        raise PlacementFailure("no node of the cluster can take part: see `k3ray nodes`, or set RAY_ADDRESS=local")
    return usable


def _layout(config: ModelConfig, nodes: Sequence[NodeFacts]) -> TapeLayout:
    """Of the nodes' tape, they are all the same one; of the one that would be packed where there is none."""
    chunks = [tape.chunk_bytes for node in nodes for tape in node.tapes if not tape.problem]
    return plan_layout(config, chunks[0]) if chunks else plan_layout(config)


def _wishes(wish: ClusterWish, positions: int) -> ClusterWishes:
    asked = wish.memory
    if asked.trunk_bytes is not None or asked.cache_bytes is not None:
        raise PlacementFailure(
            "--trunk-gb and --cache-gb divide the memory of one host: give each node's --memory or --preset, or set "
            "RAY_ADDRESS=local for this host alone"
        )
    return replace(
        ClusterWishes(wish.stages, wish.shards, positions=positions, packed=False),
        memory_bytes=asked.total_bytes,
        preset=asked.preset,
    )
