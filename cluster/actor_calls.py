"""The actors of one run as those see them who call and replace them: by kind and number, whatever carries the calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from k3ray.workers.failure import Failure
from k3ray.workers.specs import ShardSpec, StageSpec


class ActorLost(Failure):
    """An actor's process ended or does not answer, and nothing replaces it."""

    exit_code = 3


class ActorGone(ActorLost):
    """The same, found by a call: whoever can replace the actor goes on."""


class AnswerLost(ActorGone):
    """An answer that cannot be had, though the actor may live: its node does not answer, or has lost the answer.

    The actor may have done what it was asked: only what may be done twice is asked again.
    """


class InputLost(ActorGone):
    """A call that was never begun, as what it was to be given went with another actor's node."""


@dataclass(frozen=True, slots=True, order=True)
class ActorId:
    """One place of the plan, whichever process fills it."""

    kind: Literal["shard", "stage"]  # in this order: shards are replaced before the stages that ask them
    number: int

    def __str__(self) -> str:
        return f"{self.kind} {self.number}"


class Actors(Protocol):
    """Stages and shards that are called by name. A ticket may stand in a later call for the answer it will get."""

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        ...

    @property
    def num_shards(self) -> int:
        """How many shards there are; 0: the stages hold their experts."""
        ...

    def layers_of(self, stage: int) -> range:
        """Return the zero-based layers of a stage."""
        ...

    def call(self, actor: ActorId, method: str, *arguments: Any) -> Any:
        """Send a call without waiting; an actor's calls are answered in the order of sending. Returns a ticket."""
        ...

    def call_aside(self, actor: ActorId, method: str, *arguments: Any) -> Any:
        """Send a call that is answered at once, whatever the actor is working on."""
        ...

    def is_done(self, ticket: Any, timeout_s: float) -> bool:
        """Wait at most timeout_s for the answer, or the failure, of a ticket."""
        ...

    def result(self, ticket: Any) -> Any:
        """Return the answer; raises ActorGone when the actor died before it answered, else what it raised."""
        ...

    def kill(self, actor: ActorId) -> None:
        """End an actor's process, if there is one still."""
        ...

    def start(self, actor: ActorId, spec: StageSpec | ShardSpec | None = None) -> Any:
        """Put a new process in an actor's place and begin to load it, as `spec` says where given; returns a ticket."""
        ...

    def relink(self, shard: int) -> None:
        """Have every stage ask a shard's new process, which has loaded, also for what the lost one owes."""
        ...


def all_actors(actors: Actors) -> list[ActorId]:
    """Return every place of the plan."""
    return [
        *(ActorId("shard", number) for number in range(actors.num_shards)),
        *(ActorId("stage", number) for number in range(actors.num_stages)),
    ]
