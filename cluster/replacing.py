"""Waiting for actors and putting new processes in their places, within the run's bound, with a record of each time.

It knows of processes only; what a stage must be told again is recovering_chain.py's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from k3ray.cluster.actor_calls import ActorGone, ActorId, ActorLost, Actors
from k3ray.cluster.homes import Homes, OneHost, Spec
from k3ray.cluster.recovery_plan import Recovery, RecoverySettings, describe_place, may_recover
from k3ray.cluster.relocation import NoRoom
from k3ray.cluster.watch import Watch


class OutOfTime(ActorLost):
    """An answer that did not come in the time that there was for it."""


class Replacing:
    """The processes of one run: asked, watched while they are waited for, and replaced."""

    def __init__(
        self,
        actors: Actors,
        settings: RecoverySettings,
        replaced: tuple[Callable[[ActorId, Any], None], ...],
        step: Callable[[], int],
        homes: Homes | None = None,
    ) -> None:
        """replaced: hear of each new process what its load answered. step: how many steps were sent."""
        self._actors = actors
        self._settings = settings
        self._replaced = replaced
        self._step = step
        self._homes = homes or OneHost()
        self._watch = Watch(actors, settings, self._homes)
        self._starting: set[ActorId] = set()
        self._decided: dict[
            ActorId, Spec | None
        ] = {}  # of those known to be lost and not yet started: what they are loaded with
        self._failed_here: set[ActorId] = set()  # whose new process did not load on the node where it was
        self._recoveries: list[Recovery] = []
        self._until: float | None = None
        self.meanwhile: Callable[[], None] = lambda: None  # called while an answer is awaited; must not wait
        self.pulled_bytes: Callable[[], int] = lambda: 0  # of snapshots, from other hosts, since the beginning
        self._pulled_before = 0
        self._moves: dict[ActorId, list[str]] = {}  # of those replaced since the last record: from where to where
        self.begun = 0  # recoveries, with those that were hit by another loss
        self.times: Counter[ActorId] = Counter()  # how often each place has got a new process

    @property
    def recoveries(self) -> tuple[Recovery, ...]:
        """What was lost and replaced so far."""
        return tuple(self._recoveries)

    def limit(self, seconds: float | None) -> None:
        """From now on replace nobody, and give up waiting after so many seconds (OutOfTime); None: as before."""
        self._until = None if seconds is None else time.monotonic() + seconds

    def links_held(self) -> None:
        """Note that every stage has reached its shards: what is not reached from now on was cut off."""
        self._watch.links_held = True

    def result_of(self, actor: ActorId, ticket: Any, deadline_s: float | None = None, fed: bool = False) -> Any:
        """Wait for an actor's answer; raises ActorGone when it dies or hangs, and replaces shards meanwhile.

        fed: everything that it needs for the answer was sent, so that it is not to be idle.

        A stage waits for its shard's replacement inside its step, so that such a loss costs no stage its state.
        """
        started = time.monotonic()
        self._homes.check_own()
        while not self._actors.is_done(ticket, self._settings.look_s):
            self._check_time(actor)
            self._homes.check_own()
            self.meanwhile()
            lost = self._watch.look()
            if deadline_s is not None and time.monotonic() - started > deadline_s:
                hung = self._watch.hung_shards(deadline_s)
                if not hung:
                    self._actors.kill(actor)
                lost |= hung or {actor}
            elif fed and self._watch.is_left_idle(actor, started):
                lost.add(actor)
            if actor in lost or actor in self._decided:
                raise ActorGone(f"{actor} ended, or did not answer")
            if any(one.kind == "shard" for one in lost - self._starting):
                self._replace_shards(lost - self._starting)
                started = time.monotonic()
        return self._actors.result(ticket)

    def lives(self, actor: ActorId) -> bool:
        """Wait until an actor whose answer was lost on the way says that it lives; one that does not is killed."""
        self._watch.look()
        heard, until = self._watch.times_heard(actor), time.monotonic() + self._settings.sign_s
        while self._watch.times_heard(actor) == heard:
            self._check_time(actor)
            self._homes.check_own()
            if actor in self._watch.look(self._settings.settle_s) or time.monotonic() > until:
                self._actors.kill(actor)
                return False
            time.sleep(self._settings.settle_s / 4)  # a call that cannot be sent fails at once
        return True

    def lost_now(self, found: Iterable[ActorId]) -> set[ActorId]:
        """Return the stages among what was found lost and what else is, having replaced the shards; see with_mates."""
        return self.with_mates({*found, *self._watch.look(self._settings.settle_s), *self._decided})

    def with_mates(self, lost: set[ActorId]) -> set[ActorId]:
        """Return the stages among lost actors and whoever is lost with their nodes, having replaced the shards."""
        self._decide(lost)
        if any(actor.kind == "shard" for actor in self._decided):
            self._replace_shards(lost)
        return {actor for actor in self._decided if actor.kind == "stage"}

    def start(self, lost: set[ActorId]) -> dict[ActorId, Any]:
        """Begin to replace actors; returns the tickets of their loads. Raises ActorLost past the bound, NoRoom."""
        self._decide(lost)
        self.times.update(lost)
        self._starting |= lost
        tickets = {}
        for actor in sorted(lost):
            self._watch.renewed(actor)
            before, spec = self._homes.name_of(actor), self._decided.pop(actor)
            tickets[actor] = self._actors.start(actor, spec)
            move = describe_place(before, self._homes.name_of(actor))
            self._moves.setdefault(actor, []).extend([move] if move else [])
        return tickets

    def finish_start(self, actor: ActorId, ticket: Any) -> None:
        """Wait until a new process has loaded its part; raises ActorGone, and what loading raises."""
        try:
            report = self.result_of(actor, ticket)
            self._failed_here.discard(actor)
            if actor.kind == "shard":
                self._actors.relink(actor.number)
            self._watch.started(actor)
            for hear in self._replaced:
                hear(actor, report)
        except ActorGone:
            self._failed_here.add(actor)
            raise
        finally:
            self._starting.discard(actor)

    def note(
        self, named: Iterable[ActorId], started: float, layer_steps: int = 0, restored: int = 0, restored_bytes: int = 0
    ) -> None:
        """Add to the record a recovery that began at `started` (monotonic) and ends now."""
        lost, seconds, pulled = tuple(named), time.monotonic() - started, self.pulled_bytes()
        places = tuple(f"{actor}: {move}" for actor in dict.fromkeys(lost) for move in self._moves.pop(actor, ()))
        self._recoveries.append(
            Recovery(
                tuple(map(str, lost)),
                self._step(),
                seconds,
                layer_steps,
                restored,
                places,
                restored_bytes,
                pulled - self._pulled_before,
                self._watch.take_cuts(),
            )
        )
        self._pulled_before = pulled

    def _replace_shards(self, found: set[ActorId]) -> None:
        """Put new processes in the place of the shards among those found lost, and of those on their nodes."""
        started, named = time.monotonic(), list[ActorId]()
        self._decide(found)
        lost = {actor for actor in self._decided if actor.kind == "shard"}
        while lost:
            named += sorted(lost)
            loads = self.start(lost)
            lost = set()
            for shard, ticket in loads.items():
                try:
                    self.finish_start(shard, ticket)
                except ActorGone:
                    lost.add(shard)
        self.note(named, started)

    def _decide(self, lost: set[ActorId]) -> None:
        """Decide together, as one recovery, for lost actors and for whoever was on the nodes that are gone with them.

        Where a node lives its processes are started again there, unless that has failed before and there is room
        elsewhere. Who lives, but where a stage does not reach a shard, moves too.
        """
        new = lost - self._decided.keys()
        if not new:
            return
        if self._until is not None:
            raise ActorLost(f"{', '.join(map(str, sorted(new)))} ended or did not answer, while the run was ending")
        self._homes.await_own()
        gone = {actor for actor in sorted(new) if not self._homes.is_reachable(actor)}
        gone |= {mate for actor in gone for mate in self._homes.beside(actor)} - self._decided.keys()
        may_recover(self.begun, new | gone, self._settings)
        self.begun += 1
        specs = dict(self._homes.find_new(gone)) if gone else {}
        for actor in sorted((new - gone) & self._failed_here):
            with suppress(NoRoom):
                specs |= self._homes.find_new({actor})
        specs |= self._homes.find_beyond_cuts({**self._decided, **specs})
        self._decided |= {actor: specs.get(actor) for actor in new | gone | specs.keys()}

    def _check_time(self, actor: ActorId) -> None:
        if self._until is not None and time.monotonic() > self._until:
            raise OutOfTime(f"{actor} did not answer in the time that was left")
