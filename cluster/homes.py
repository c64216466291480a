"""On which node each actor of a run lives, as the recovery asks: near or far, reachable or not, and where else to go.

Which nodes there are and what they have free is another file's (living_nodes.py); where a lost actor goes is
relocation.py's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from k3ray.cluster.actor_calls import ActorId
from k3ray.cluster.cut_links import CutLink
from k3ray.workers.specs import ShardSpec, StageSpec

Spec = StageSpec | ShardSpec
NewSpecs = Mapping[ActorId, Spec]


class Homes(Protocol):
    """The nodes of a run."""

    def is_near(self, actor: ActorId) -> bool:
        """Whether an actor's files can be opened by this process."""
        ...

    def name_of(self, actor: ActorId) -> str:
        """Return the name of an actor's node; empty where there is one host only."""
        ...

    def is_reachable(self, actor: ActorId) -> bool:
        """Whether an actor's node lives and answers this process; may take seconds where it does not."""
        ...

    def beside(self, actor: ActorId) -> frozenset[ActorId]:
        """Return all actors of an actor's node, itself too."""
        ...

    def find_new(self, lost: Collection[ActorId]) -> NewSpecs:
        """Return what actors are loaded with on other nodes, all of them placed together; raises NoRoom."""
        ...

    def note_cut(self, cut: CutLink) -> str:
        """Believe from now on that the nodes of two actors do not reach each other; returns that in words."""
        ...

    def is_cut(self, one: ActorId, other: ActorId) -> bool:
        """Whether the nodes of two actors are believed not to reach each other."""
        ...

    def find_beyond_cuts(self, decided: Mapping[ActorId, Spec | None]) -> NewSpecs:
        """Return what actors are loaded with on other nodes so that every stage reaches every shard; raises NoRoom.

        decided: what others are about to be loaded with.
        """
        ...

    def check_own(self) -> None:
        """Raise HeadLost when the head of the cluster, or Ray on this host, has not answered for long; asks seldom."""
        ...

    def await_own(self) -> None:
        """Wait until both answer, as nothing can be started without them; raises HeadLost."""
        ...


class OneHost:
    """Everything on this host, where a process can always be started again."""

    def is_near(self, actor: ActorId) -> bool:
        """Always."""
        return True

    def name_of(self, actor: ActorId) -> str:
        """Nothing: nobody need be told."""
        return ""

    def is_reachable(self, actor: ActorId) -> bool:
        """Always."""
        return True

    def beside(self, actor: ActorId) -> frozenset[ActorId]:
        """Not asked: the host is never gone."""
        return frozenset((actor,))

    def find_new(self, lost: Collection[ActorId]) -> NewSpecs:
        """Nothing: processes are started again in place."""
        return {}

    def note_cut(self, cut: CutLink) -> str:
        """Nothing to note: processes that do not reach each other here are started again."""
        return cut.what

    def is_cut(self, one: ActorId, other: ActorId) -> bool:
        """Never."""
        return False

    def find_beyond_cuts(self, decided: Mapping[ActorId, Spec | None]) -> NewSpecs:
        """Nothing."""
        return {}

    def check_own(self) -> None:
        """Nothing to check: were the host gone, so were this process."""

    def await_own(self) -> None:
        """Nothing to wait for."""
