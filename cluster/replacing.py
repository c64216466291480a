"""Waiting for actors and putting new processes in their places, within the run's bound, with a record of each time.

It knows of processes only; what a stage must be told again is recovering_chain.py's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from k3ray.cluster.actor_calls import ActorGone, ActorId, Actors
from k3ray.cluster.recovery_plan import Recovery, RecoverySettings, may_recover
from k3ray.cluster.watch import Watch


class Replacing:
    """The processes of one run: asked, watched while they are waited for, and replaced."""

    def __init__(
        self,
        actors: Actors,
        settings: RecoverySettings,
        replaced: Callable[[ActorId, Any], None],
        step: Callable[[], int],
    ) -> None:
        """replaced: hears of each new process what its load answered. step: how many steps were sent."""
        self._actors = actors
        self._settings = settings
        self._replaced = replaced
        self._step = step
        self._watch = Watch(actors, settings)
        self._starting: set[ActorId] = set()
        self._recoveries: list[Recovery] = []
        self.begun = 0  # recoveries, with those that were hit by another loss
        self.times: Counter[ActorId] = Counter()  # how often each place has got a new process

    @property
    def recoveries(self) -> tuple[Recovery, ...]:
        """What was lost and replaced so far."""
        return tuple(self._recoveries)

    def result_of(self, actor: ActorId, ticket: Any, deadline_s: float | None = None) -> Any:
        """Wait for an actor's answer; raises ActorGone when it dies or hangs, and replaces shards meanwhile.

        A stage waits for its shard's replacement inside its step, so that such a loss costs no stage its state.
        """
        started = time.monotonic()
        while not self._actors.is_done(ticket, self._settings.look_s):
            lost = self._watch.look()
            if deadline_s is not None and time.monotonic() - started > deadline_s:
                self._actors.kill(actor)
                lost.add(actor)
            if actor in lost:
                raise ActorGone(f"{actor} ended, or did not answer")
            if shards := {one for one in lost - self._starting if one.kind == "shard"}:
                self.replace_shards(shards)
                started = time.monotonic()
        return self._actors.result(ticket)

    def lost_now(self, found: Iterable[ActorId]) -> set[ActorId]:
        """Return what was found lost and what else is, having replaced the shards among them."""
        lost = {*found, *self._watch.look(self._settings.settle_s)}
        if shards := {actor for actor in lost if actor.kind == "shard"}:
            self.replace_shards(shards)
        return lost - shards

    def replace_shards(self, lost: set[ActorId]) -> None:
        """Put new processes in the place of shards."""
        started, named = time.monotonic(), list[ActorId]()
        while lost:
            named += sorted(lost)
            loads = self.start(lost)
            lost = set()
            for shard, ticket in loads.items():
                try:
                    self.finish_start(shard, ticket)
                except ActorGone:
                    lost.add(shard)
        self.note(named, started, 0, 0)

    def start(self, lost: set[ActorId]) -> dict[ActorId, Any]:
        """Begin to replace actors; returns the tickets of their loads. Raises ActorLost past the bound."""
        may_recover(self.begun, lost, self._settings)
        self.begun += 1
        self.times.update(lost)
        self._starting |= lost
        for actor in lost:
            self._watch.renewed(actor)
        return {actor: self._actors.start(actor) for actor in sorted(lost)}

    def finish_start(self, actor: ActorId, ticket: Any) -> None:
        """Wait until a new process has loaded its part; raises ActorGone, and what loading raises."""
        try:
            report = self.result_of(actor, ticket)
            self._watch.answered(actor)
            if actor.kind == "shard":
                self._actors.relink(actor.number)
            self._replaced(actor, report)
        finally:
            self._starting.discard(actor)

    def note(self, named: Iterable[ActorId], started: float, layer_steps: int, restored: int) -> None:
        """Add to the record a recovery that began at `started` (monotonic) and ends now."""
        names, seconds = tuple(str(actor) for actor in named), time.monotonic() - started
        self._recoveries.append(Recovery(names, self._step(), seconds, layer_steps, restored))
