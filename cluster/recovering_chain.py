"""A chain of stages that goes on when actors die: acts on what recovery_plan.py decides, and keeps a record of it.

To the driver it is a StageChain. It keeps every stage's messages since its last snapshot; a stage that is lost gets a
new process, its snapshot and its own messages again, and the steps on their way go on from where they were.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import pyarrow as pa

from k3ray.cluster.actor_calls import ActorGone, ActorId, Actors
from k3ray.cluster.flights import Flight, Flights
from k3ray.cluster.recovery_plan import (
    Pace,
    Recovery,
    RecoverySettings,
    count_layer_steps,
    may_recover,
    plan_replays,
    snapshot_is_due,
)
from k3ray.cluster.replaying import repeat, restore
from k3ray.cluster.snapshot_files import SnapshotFile
from k3ray.cluster.snapshot_rounds import SnapshotRounds
from k3ray.cluster.step_log import Restored, StepLog
from k3ray.cluster.watch import Watch
from k3ray.workers.failure import Failure
from k3ray.workers.model.snapshot import StatePiece


class RecoveringChain:
    """The stages and shards of one run, each replaced when it is lost, within the settings' bound."""

    def __init__(
        self,
        actors: Actors,
        settings: RecoverySettings,
        replaced: Callable[[ActorId, Any], None] = lambda actor, report: None,
    ) -> None:
        """actors: loaded. replaced: hears of each new process what its load answered."""
        self._actors = actors
        self._settings = settings
        self._replaced = replaced
        self._log = StepLog(actors.num_stages)
        self._flights = Flights(actors, self._log)
        self._rounds = SnapshotRounds(actors, self._log)
        self._watch = Watch(actors, settings)
        self._pace = Pace()
        self.recoveries: list[Recovery] = []
        self._starting: set[ActorId] = set()
        self._begun = 0  # recoveries, those included that did not succeed

    @property
    def num_stages(self) -> int:
        """How many stages a frame passes."""
        return self._actors.num_stages

    def open_sequence(self, session: int, capacity: int) -> None:
        """Begin an empty sequence in every stage."""
        self._log.opened(session, capacity)
        pending = self._call_stages("open_sequence", session, capacity)
        try:
            for stage, ticket in pending:
                try:
                    self.result_of(stage, ticket)
                except ActorGone:
                    self._recover({stage})  # its replacement learns it from the log
        except Failure:
            self._log.not_opened(session)
            raise

    def close_sequence(self, session: int) -> None:
        """Forget a sequence in every stage. A stage that is lost has forgotten it; its next caller will notice."""
        self._flights.forget_session(session)
        self._log.closed(session)
        for stage, ticket in self._call_stages("close_sequence", session):
            with suppress(ActorGone):
                self.result_of(stage, ticket)

    def snapshot(self, session: int) -> Iterator[tuple[StatePiece, pa.Buffer]]:
        """Yield a sequence's state piece by piece, layer by layer; no step may be sent meanwhile."""
        for stage in self._stages():
            for piece in self.ask(stage, "pieces", session):
                yield piece, self.ask(stage, "snapshot_piece", session, piece)

    def restore(self, session: int, pieces: Iterable[tuple[int, pa.Buffer]], capacity: int) -> None:
        """Open a sequence from its (layer, piece)s: each goes to the stage that holds the layer now."""
        files = tuple(SnapshotFile() for _ in range(self.num_stages))
        for layer, message in pieces:
            for stage, file in enumerate(files):
                if layer in self._actors.layers_of(stage):
                    file.add(message)
        self._log.loaded(session, capacity, files)
        try:
            for stage_id, file in zip(self._stages(), files, strict=True):
                try:
                    restore(self._actors, stage_id, Restored(session, capacity, file), self.result_of)
                except ActorGone:
                    self._recover({stage_id})  # its replacement gets it from the log
        except Failure:
            self._log.not_opened(session)
            raise

    def submit(self, message: pa.Buffer) -> Flight:
        """Send a frame down the chain without waiting."""
        flight = self._flights.send(self._log.stepped(message))
        if snapshot_is_due(self._log, self._rounds.since, self._settings):
            self._rounds.begin()
        return flight

    def collect(self, ticket: Flight) -> pa.Buffer:
        """Wait for the last stage's answer, whoever is lost meanwhile; raises what failed on the way, ActorGone."""
        self._flights.begin(ticket)
        while not ticket.is_finished:
            stage, tokens = ActorId("stage", ticket.answered), ticket.step.tokens
            started, begun = time.monotonic(), self._begun
            deadline_s = self._pace.deadline_s(tokens, self._settings)
            try:
                answer = self.result_of(stage, ticket.tickets[ticket.answered], deadline_s)
            except ActorGone:
                self._recover({stage})
                continue
            except Failure:
                self._flights.clear()
                raise
            if begun == self._begun:
                self._pace = self._pace.after(time.monotonic() - started, tokens)
            self._flights.answer(ticket, answer)
        self._flights.end(ticket)
        self._rounds.gather()
        assert ticket.last is not None
        return ticket.last

    def ask(self, actor: ActorId, method: str, *arguments: Any) -> Any:
        """Call an actor and wait; one that is lost is replaced and asked again."""
        while True:
            try:
                return self.result_of(actor, self._actors.call(actor, method, *arguments))
            except ActorGone:
                self._recover({actor})

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
                self._replace_shards(shards)
                started = time.monotonic()
        return self._actors.result(ticket)

    def _call_stages(self, method: str, *arguments: Any) -> list[tuple[ActorId, Any]]:
        return [(stage, self._actors.call(stage, method, *arguments)) for stage in self._stages()]

    def _stages(self) -> list[ActorId]:
        return [ActorId("stage", number) for number in range(self.num_stages)]

    def _replace_shards(self, lost: set[ActorId]) -> None:
        """Put new processes in the place of shards; the stages are linked to them as they start."""
        started, named = time.monotonic(), sorted(lost)
        while lost:
            loads = self._start(lost)
            lost = set()
            for shard, ticket in loads.items():
                try:
                    self._finish_start(shard, ticket)
                except ActorGone:
                    lost.add(shard)
                    named.append(shard)
        self._note(named, started, 0, 0)

    def _recover(self, found: set[ActorId]) -> None:
        """Replace what is lost, until nothing is, and send the steps on their way on from where they were."""
        lost = found | self._watch.look(self._settings.settle_s)
        if shards := {actor for actor in lost if actor.kind == "shard"}:
            self._replace_shards(shards)
            lost -= shards
        if not lost:
            return
        started, named, layer_steps, restored = time.monotonic(), list[ActorId](), 0, 0
        loads: dict[ActorId, Any] = {}
        while lost or loads:
            named += sorted(lost)
            loads |= self._start(lost) if lost else {}
            lost = self._flights.salvage(self.result_of) - loads.keys()  # while the new processes load
            if lost:
                continue
            replays = plan_replays((stage.number for stage in loads), self._log, self._flights.answered())
            for stage, ticket in loads.items():
                replay = replays[stage.number]
                try:
                    self._finish_start(stage, ticket)
                    repeat(self._actors, stage, replay, self.result_of)
                except ActorGone:
                    lost.add(stage)
                    continue
                layer_steps += count_layer_steps(replay, self._actors.layers_of(stage.number))
                restored += sum(isinstance(told, Restored) for told in replay)
            loads = {}
        self._flights.resend()
        self._note(named, started, layer_steps, restored)

    def _start(self, lost: set[ActorId]) -> dict[ActorId, Any]:
        """Begin to replace actors, within the bound; returns the tickets of their loads."""
        may_recover(self._begun, lost, self._settings)
        self._begun += 1
        for actor in lost:
            self._watch.renewed(actor)
            if actor.kind == "stage":
                self._rounds.forget(actor.number)
        self._starting |= lost
        return {actor: self._actors.start(actor) for actor in sorted(lost)}

    def _finish_start(self, actor: ActorId, ticket: Any) -> None:
        try:
            self._replaced(actor, self.result_of(actor, ticket))
        finally:
            self._starting.discard(actor)

    def _note(self, named: list[ActorId], started: float, layer_steps: int, restored: int) -> None:
        names, seconds = tuple(str(actor) for actor in named), time.monotonic() - started
        self.recoveries.append(Recovery(names, self._log.num_steps, seconds, layer_steps, restored))
