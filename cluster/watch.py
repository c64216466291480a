"""Looking at the actors while an answer is awaited: who has ended, who does not even say that he lives, and who says
that he does not reach another one.
"""

from __future__ import annotations

import math
import time
from typing import Any

from k3ray.cluster.actor_calls import ActorGone, ActorId, Actors, AnswerLost, all_actors
from k3ray.cluster.cut_links import CutLink, Sign, cut_off, is_left_idle
from k3ray.cluster.homes import Homes
from k3ray.cluster.recovery_plan import Look, RecoverySettings, hung_shards, silent_actors
from k3ray.workers.stage_sign import StageSign


class Watch:
    """One question at a time to every actor, asked aside of its work: to a stage which shards it does not reach, to a
    shard for how long it has been at its work.
    """

    def __init__(self, actors: Actors, settings: RecoverySettings, homes: Homes) -> None:
        self._actors = actors
        self._settings = settings
        self._homes = homes
        self._asked: dict[ActorId, tuple[Look, Any]] = {}
        self._answers: dict[ActorId, int] = dict.fromkeys(all_actors(actors), 1)  # the load was one
        self._busy_s: dict[ActorId, float] = {}
        self._signs: dict[ActorId, Sign] = {}
        self._linked_at: dict[ActorId, float] = {}  # when the stages were told of a shard's new process
        self._cuts: dict[ActorId, str] = {}  # who was replaced, or is about to be, because of a link, and what is known
        self.links_held = False  # once, all of them

    def look(self, timeout_s: float = 0.0) -> set[ActorId]:
        """Return the actors that have died, those that are silent for too long, which are killed here, and the shards
        that live and that a stage does not reach.

        timeout_s: how long to wait for each that has not answered yet.
        """
        lost: set[ActorId] = set()
        for actor in self._answers:
            if actor not in self._asked:
                self._asked[actor] = Look(time.monotonic(), self._answers[actor]), self._ask(actor)
        for actor, (look, ticket) in list(self._asked.items()):
            if not self._actors.is_done(ticket, timeout_s):
                continue
            try:
                self._heard(actor, look, self._actors.result(ticket))
            except AnswerLost:  # no answer, and no sign of a death either
                if time.monotonic() - look.asked_at > self._settings.sign_s:
                    self._actors.kill(actor)
                    del self._asked[actor]
                    lost.add(actor)
                else:
                    self._asked[actor] = look, self._ask(actor)
            except ActorGone:
                del self._asked[actor]
                lost.add(actor)
        return lost | self._silent() | self._cut_off()

    def times_heard(self, actor: ActorId) -> int:
        """Return how often an actor has answered a question."""
        return self._answers[actor]

    def hung_shards(self, deadline_s: float) -> set[ActorId]:
        """Return the shards because of which a stage has passed its deadline, by what they said last; killed here."""
        found = hung_shards(self._busy_s, deadline_s, self._settings)
        for shard in found:
            self._actors.kill(shard)
        return found

    def is_left_idle(self, stage: ActorId, since: float) -> bool:
        """Whether a stage has had nothing to do for too long, while all that it needs was sent to it; killed here.

        since: when its answer began to be awaited. What cannot get there from the stage before waits in its queue.
        """
        if not is_left_idle(self._signs.get(stage), since, time.monotonic(), self._settings):
            return False
        what, before = f"{stage} has had nothing to do while its answer was awaited", ActorId("stage", stage.number - 1)
        if stage.number == 0 or self._homes.is_near(stage) or self._homes.is_near(before):
            self._cuts[stage] = what
        else:
            self._cuts[stage] = self._homes.note_cut(CutLink(before, stage, f"{what}: it does not get {before}'s"))
        self._actors.kill(stage)
        return True

    def take_cuts(self) -> tuple[str, ...]:
        """Return what was found out about links since the last time."""
        cuts, self._cuts = tuple(self._cuts.values()), {}
        return cuts

    def started(self, actor: ActorId) -> None:
        """Note that an actor has loaded, and that those who ask it have been told."""
        self._answers[actor] += 1
        self._linked_at[actor] = time.monotonic()

    def renewed(self, actor: ActorId) -> None:
        """Forget what was asked of an actor whose process is new."""
        self._asked.pop(actor, None)
        self._busy_s.pop(actor, None)
        self._signs.pop(actor, None)
        self._linked_at[actor] = math.inf
        self._answers[actor] = 0

    def _ask(self, actor: ActorId) -> Any:
        return self._actors.call_aside(actor, "busy_s" if actor.kind == "shard" else "sign")

    def _heard(self, actor: ActorId, look: Look, answer: Any) -> None:
        del self._asked[actor]
        self._answers[actor] += 1
        if actor.kind == "shard":
            self._busy_s[actor] = answer
            self._signs[actor] = Sign(look.asked_at, StageSign())
        else:
            self._signs[actor] = Sign(look.asked_at, answer)

    def _cut_off(self) -> set[ActorId]:
        found = cut_off(self._signs, self._linked_at, time.monotonic(), self._settings, self.links_held)
        for cut in found:
            self._cuts[cut.other] = self._homes.note_cut(cut)
        return {cut.other for cut in found}

    def _silent(self) -> set[ActorId]:
        looks, now = {actor: look for actor, (look, _) in self._asked.items()}, time.monotonic()
        overdue = {
            actor for actor, look in looks.items() if not look.answers and now - look.asked_at > self._settings.silent_s
        }
        unreachable = {actor for actor in overdue if not self._homes.is_reachable(actor)}
        silent = silent_actors(looks, now, self._settings, unreachable)
        for actor in silent:
            self._actors.kill(actor)
            del self._asked[actor]
        return silent
