"""The joined Ray cluster as it is now (ClusterView of cluster_view.py): who is alive, who answers, what joined."""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import ray

from k3ray.cluster.node_survey import survey
from k3ray.cluster.ray_memory import memory_left, reserve
from k3ray.cluster.roots_file import RootsMap
from k3ray.cluster.topology import NodeFacts, can_join
from k3ray.workers.process_report import versions

CONNECT_S = 2.0
TRIES = 2
SURVEY_S = 15.0  # a node that joined and does not answer by then is not used


class RayView:
    """What Ray knows, and what a connection shows: Ray itself believes in a node for up to a minute after its end."""

    def __init__(self, address: str, roots: RootsMap, members: Sequence[NodeFacts]) -> None:
        """address: of the head, HOST:PORT. roots: where nodes have the model. members: the facts of the run's nodes,
        with which those of others are compared.
        """
        self._own = str(ray.get_runtime_context().get_node_id())
        host, _, port = address.rpartition(":")
        self._head = host.strip("[]"), int(port)
        self._roots = roots
        self._members = tuple(members)
        self._addresses: dict[str, tuple[str, int]] = {}
        self.alive()

    @property
    def own_id(self) -> str:
        """The node that this process runs on."""
        return self._own

    def alive(self) -> list[str]:
        """Return the ids of the nodes that Ray takes for alive."""
        nodes: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]
        self._addresses |= {node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerPort"]) for node in nodes}
        return [node["NodeID"] for node in nodes]

    def answers(self, node_id: str) -> bool:
        """Whether Ray's own process of a node accepts a connection within TRIES times CONNECT_S."""
        address = self._addresses.get(node_id)
        return address is not None and any(_accepts(address) for _ in range(TRIES))

    def silent(self) -> str:
        """Return which of the head and this host's Ray does not accept a connection within CONNECT_S, in words."""
        if not _accepts(self._head):
            return f"the head of the Ray cluster ({self._head[0]}:{self._head[1]})"
        own = self._addresses.get(self._own)
        return "" if own is None or _accepts(own) else f"Ray on this host ({own[0]}:{own[1]})"

    def memory_left(self) -> Mapping[str, int]:
        """Return the bytes that Ray still gives to actors, by node id."""
        return memory_left()

    def hold_memory(self, node_id: str, nbytes: int) -> None:
        """Have Ray count bytes of a node as this run's, as soon as it has them."""
        reserve(node_id, nbytes)

    def look_at(self, node_ids: Collection[str]) -> Sequence[NodeFacts]:
        """Return the facts of those of the nodes that can take part."""
        if not node_ids:
            return ()
        found = survey(self._roots, answer_s=SURVEY_S, only=frozenset(node_ids))
        return [node for node in found if can_join(self._members, node, versions())]


def _accepts(address: tuple[str, int]) -> bool:
    try:
        with socket.create_connection(address, timeout=CONNECT_S):
            return True
    except OSError:
        return False
