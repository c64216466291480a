"""What the recovery asks of the cluster as it is now, and of the actors that are placed in it: the faces of both."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from k3ray.cluster.actor_calls import ActorId, Actors
from k3ray.cluster.homes import Spec
from k3ray.cluster.topology import NodeFacts


class PlacedActors(Actors, Protocol):
    """Actors of which is known what each was loaded with last."""

    def spec_of(self, actor: ActorId) -> Spec:
        """Return an actor's part, node and all."""
        ...


class ClusterView(Protocol):
    """The cluster as it is now."""

    @property
    def own_id(self) -> str:
        """The node that this process runs on."""
        ...

    def alive(self) -> Collection[str]:
        """Return the ids of the nodes that the cluster takes for alive: it may believe so for a minute too long."""
        ...

    def answers(self, node_id: str) -> bool:
        """Whether a node accepts a connection within a few seconds."""
        ...

    def silent(self) -> str:
        """Return which of the head and this host's part of the cluster accepts no connection; empty: both do."""
        ...

    def memory_left(self) -> Mapping[str, int]:
        """Return the bytes that the cluster still gives to actors, by node id."""
        ...

    def hold_memory(self, node_id: str, nbytes: int) -> None:
        """Have the cluster count bytes of a node, which no actor takes, as this run's; does not wait."""
        ...

    def look_at(self, node_ids: Collection[str]) -> Sequence[NodeFacts]:
        """Return the facts of nodes that can take part: the same versions, the same model."""
        ...
