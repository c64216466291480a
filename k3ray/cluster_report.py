"""What a run did on its nodes, as records: bytes planned and measured on each, and what went between the actors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from k3ray.cluster.budget_plan import gigabytes
from k3ray.cluster.placement import ActorPlacement, Placement
from k3ray.workers.message_counts import ARROW, NEXT, MessageCounts


@dataclass(frozen=True, slots=True)
class ActorReport:
    """One actor. measured_bytes: the most that its process held (PSS), None where it could not say: with its share
    of the libraries' pages, which the plan counts once a node and not in planned_bytes. layers: first..stop of a stage.
    numa: the memory node.
    """

    part: str
    planned_bytes: int
    measured_bytes: int | None
    threads: int
    cores: tuple[int, ...]
    numa: int | None
    layers: tuple[int, int] | None
    experts_owned: int
    expert_slots: int


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One node, with the actors that were there at the end. measured_bytes: of all our processes there, by PSS: at one
    moment on the command's node, elsewhere the sum of what each actor held at most, without Ray's own processes.
    """

    name: str
    node_id: str
    address: str
    planned_bytes: int
    measured_bytes: int
    actors: tuple[ActorReport, ...]

    def describe(self) -> str:
        """One line."""
        return f"{self.name}: {gigabytes(self.planned_bytes)} planned, {gigabytes(self.measured_bytes)} measured"


@dataclass(frozen=True, slots=True)
class MessageReport:
    """Bytes of all messages between actors, and with the driver. between_nodes_bytes: of them, those that left a node,
    by where both ends were at the time.

    positions: of the steps, over the prompt and what was generated. ways: by sender and receiver.
    """

    positions: int
    total_bytes: int
    between_nodes_bytes: int
    ways: Mapping[str, int]

    @property
    def between_nodes_per_position(self) -> int:
        """What a position of a sequence sends over the network."""
        return self.between_nodes_bytes // max(1, self.positions)

    def describe(self) -> str:
        """One line."""
        each = max(1, self.positions)
        return (
            f"messages: {self.total_bytes // each:,} bytes a position, of which {self.between_nodes_per_position:,} "
            "between nodes"
        )


def node_reports(
    placement: Placement,
    node_of: Mapping[str, str],
    driver_node: str,
    here_bytes: int,
    peaks: Mapping[str, int],
    planned: Mapping[str, int],
) -> tuple[NodeReport, ...]:
    """The nodes of a placement, and those that took over from lost ones. node_of: the name of the node on which each
    part is now, planned: what it may take there. driver_node: its name; here_bytes: measured there; peaks: of actors,
    by their part.
    """
    actors = [_actor(actor, peaks, planned) for actor in (*placement.stages, *placement.shards)]
    nodes = [(node.name, node.node_id, node.address, sum(node.parts.values())) for node in placement.nodes]
    known = {node.name for node in placement.nodes}
    nodes += [(name, "", "", 0) for name in dict.fromkeys(node_of.values()) if name not in known]
    found = []
    for name, node_id, address, once_bytes in nodes:
        here = tuple(actor for actor in actors if node_of[actor.part] == name)
        measured = here_bytes if name == driver_node else sum(actor.measured_bytes or 0 for actor in here)
        whole = once_bytes + sum(actor.planned_bytes for actor in here) if here or name == driver_node else 0
        found.append(NodeReport(name, node_id, address, whole, measured, here))
    return tuple(found)


def message_report(counts: MessageCounts, stages: list[str]) -> MessageReport:
    """The messages of a run. stages: their parts, in order."""
    following = dict(pairwise(stages))
    ways: dict[str, int] = {}
    for way, nbytes in counts.way_bytes.items():
        sender, _, receiver = way.partition(ARROW)
        if receiver == NEXT:
            receiver = following[sender]
        ways[f"{sender}{ARROW}{receiver}"] = nbytes
    return MessageReport(counts.positions, counts.total_bytes, counts.between_bytes, ways)


def report_lines(nodes: tuple[NodeReport, ...], messages: MessageReport | None) -> Iterator[str]:
    """What the terminal is told of a run on several nodes."""
    if len(nodes) > 1:
        yield from (node.describe() for node in nodes)
        if messages is not None:
            yield messages.describe()


def _actor(actor: ActorPlacement, peaks: Mapping[str, int], planned: Mapping[str, int]) -> ActorReport:
    budget = actor.budget
    return ActorReport(
        budget.name, planned[budget.name], peaks.get(budget.name), actor.threads, actor.cores, actor.numa,
        (actor.first, actor.stop) if actor.stop else None, budget.owned_experts, budget.cache_slots,
    )  # fmt: skip
