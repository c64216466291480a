"""Looking at the actors while an answer is awaited: who has ended, and who does not even say that he lives."""

from __future__ import annotations

import time
from typing import Any

from k3ray.cluster.actor_calls import ActorGone, ActorId, Actors, all_actors
from k3ray.cluster.recovery_plan import Look, RecoverySettings, silent_actors


class Watch:
    """One question at a time to every actor, asked aside of its work."""

    def __init__(self, actors: Actors, settings: RecoverySettings) -> None:
        self._actors = actors
        self._settings = settings
        self._asked: dict[ActorId, tuple[Look, Any]] = {}
        self._answers: dict[ActorId, int] = dict.fromkeys(all_actors(actors), 1)  # the load was one

    def look(self, timeout_s: float = 0.0) -> set[ActorId]:
        """Return the actors that have died, and those that are silent for too long, which are killed here.

        timeout_s: how long to wait for each that has not answered yet.
        """
        lost: set[ActorId] = set()
        for actor in self._answers:
            if actor not in self._asked:
                look = Look(time.monotonic(), self._answers[actor])
                self._asked[actor] = look, self._actors.call_aside(actor, "ping")
        for actor, (_, ticket) in list(self._asked.items()):
            if not self._actors.is_done(ticket, timeout_s):
                continue
            del self._asked[actor]
            try:
                self._actors.result(ticket)
                self._answers[actor] += 1
            except ActorGone:
                lost.add(actor)
        looks = {actor: look for actor, (look, _) in self._asked.items()}
        for actor in silent_actors(looks, time.monotonic(), self._settings):
            self._actors.kill(actor)
            del self._asked[actor]
            lost.add(actor)
        return lost

    def answered(self, actor: ActorId) -> None:
        """Note that an actor has answered something: it is known to have started."""
        self._answers[actor] += 1

    def renewed(self, actor: ActorId) -> None:
        """Forget what was asked of an actor whose process is new."""
        self._asked.pop(actor, None)
        self._answers[actor] = 0
