"""A chain of stages that goes on when actors die: acts on what recovery_plan.py decides, and keeps a record of it.

To the driver it is a StageChain. It keeps every stage's messages since its last snapshot; a stage that is lost gets a
new process, its snapshot and its own messages again, and the steps on their way go on from where they were.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from k3ray.cluster.actor_calls import ActorGone, ActorId, Actors, AnswerLost, all_actors
from k3ray.cluster.flights import Flight, Flights
from k3ray.cluster.homes import Homes, OneHost
from k3ray.cluster.kept_counts import KeptCounts
from k3ray.cluster.recovery_plan import (
    Pace,
    Recovery,
    RecoverySettings,
    count_layer_steps,
    plan_replays,
    snapshot_is_due,
)
from k3ray.cluster.replacing import Replacing
from k3ray.cluster.replaying import repeat, restore
from k3ray.cluster.snapshot_files import deal_out
from k3ray.cluster.snapshot_rounds import SnapshotRounds
from k3ray.cluster.step_log import Restored, StepLog
from k3ray.workers.failure import Failure
from k3ray.workers.frames import decode_logits
from k3ray.workers.io_counts import IoCounts
from k3ray.workers.model.snapshot import StatePiece, piece_of


class RecoveringChain:
    """The stages and shards of one run, each replaced when it is lost, within the settings' bound."""

    def __init__(
        self,
        actors: Actors,
        settings: RecoverySettings,
        replaced: Callable[[ActorId, Any], None] = lambda actor, report: None,
        homes: Homes | None = None,
    ) -> None:
        """actors: loaded. replaced: hears of each new process what its load answered. homes: None: all on this host."""
        self._actors = actors
        self._settings = settings
        self._log = StepLog(actors.num_stages)
        self._kept = KeptCounts(all_actors(actors))

        homes = homes or OneHost()
        hear = (self._kept.renewed, replaced)
        self._processes = Replacing(actors, settings, hear, lambda: self._log.num_steps, homes)
        self._result_of = self._processes.result_of
        self._flights = Flights(actors, self._log, homes.is_cut)
        self._rounds = SnapshotRounds(actors, self._log, homes.is_near)
        self._processes.meanwhile = self._gather
        self._processes.pulled_bytes = lambda: self._rounds.pulled_bytes
        self._snapshots_due = False  # behind the steps that were submitted, once all stages were sent them
        self._counts_due = False  # after a round of snapshots
        self._pace = Pace()
        self._unready: set[ActorId] = set()  # stages that were not yet told what their predecessors knew

    @property
    def recoveries(self) -> tuple[Recovery, ...]:
        """What was lost and replaced so far."""
        return self._processes.recoveries

    @property
    def num_stages(self) -> int:
        """How many stages a frame passes."""
        return self._actors.num_stages

    def open_sequence(self, session: int, capacity: int) -> None:
        """Begin an empty sequence in every stage."""
        self._log.opened(session, capacity)

        def tell(stage: ActorId) -> None:
            self._result_of(stage, self._actors.call(stage, "open_sequence", session, capacity))

        self._begin_sequence(session, tell)

    def close_sequence(self, session: int) -> None:
        """Have every stage forget a sequence after what it is working on; nobody waits for that.

        A stage that is lost has forgotten it, and its replacement is told what the log says then.
        """
        self._flights.forget_session(session)
        self._rounds.closed(session)
        self._log.closed(session)
        for stage in self._stages():
            self._actors.call(stage, "close_sequence", session)

    def snapshot(self, session: int) -> Iterator[tuple[StatePiece, pa.Buffer]]:
        """Yield a sequence's state piece by piece, layer by layer; no step may be sent meanwhile."""
        for stage in self._stages():
            for piece in self._ask(stage, "pieces", session):
                yield piece, self._ask(stage, "snapshot_piece", session, piece)

    def restore(self, session: int, pieces: Iterable[tuple[int, pa.Buffer]], capacity: int) -> None:
        """Open a sequence from its (layer, piece)s: each goes to the stage that holds the layer now."""
        files = deal_out(pieces, [self._actors.layers_of(stage) for stage in range(self.num_stages)])
        self._log.loaded(session, capacity, files)
        self._rounds.loaded(session, tuple(Restored(session, capacity, file) for file in files))

        def tell(stage: ActorId) -> None:
            restore(self._actors, stage, Restored(session, capacity, files[stage.number]), self._result_of)

        self._begin_sequence(session, tell)

    def submit(self, message: pa.Buffer) -> Flight:
        """Send a frame down the chain without waiting."""
        flight = self._flights.send(self._log.stepped(message))
        self._snapshots_due |= snapshot_is_due(self._log, self._rounds.since, self._settings)
        self._begin_snapshots()
        return flight

    def collect(self, ticket: Flight) -> pa.Buffer:
        """Wait for the last stage's answer, whoever is lost meanwhile; raises what failed on the way, ActorGone."""
        self._flights.begin(ticket)
        while not ticket.is_finished:
            stage, tokens = ActorId("stage", ticket.answered), ticket.step.tokens
            if ticket.tickets[ticket.answered] is None:  # an interrupt ended a recovery half way
                self._recover({stage})
            started, begun = time.monotonic(), self._processes.begun
            deadline_s = self._pace.deadline_s(tokens, self._settings)
            try:
                answer = self._result_of(stage, ticket.tickets[ticket.answered], deadline_s, fed=True)
            except ActorGone as lost:
                again = self._flights.take_back_after(lost, ticket) and self._processes.lives(stage)
                self._recover(set() if again else {stage})
                continue
            except Failure:
                self._flights.clear()
                raise
            if begun == self._processes.begun:
                self._pace = self._pace.after(time.monotonic() - started, tokens)
            self._flights.answer(ticket, answer)
        self._flights.end(ticket)
        self._processes.links_held()
        self._begin_snapshots()
        self._gather()
        if self._counts_due:
            self._kept.ask(self._ask)  # as often as snapshots, so that a lost actor's counters are not all forgotten
            self._counts_due = False
        self._kept.met(decode_logits(last := ticket.last).damaged)
        return last

    def restore_point(self, session: int) -> Iterator[tuple[StatePiece, pa.Buffer]]:
        """Yield a sequence's state at the last moment at which it was kept of all stages, asking nobody.

        Nothing where it was kept of none: the sequence is short, or no snapshots are taken.
        """
        for restored in self._rounds.whole(session):
            for message in restored.snapshot.pieces():
                yield piece_of(message), message

    def limit(self, seconds: float | None) -> None:
        """From now on replace nobody and wait no longer than so many seconds for anything; None: as before."""
        self._processes.limit(seconds)

    def counts(self) -> IoCounts:
        """Return what all actors have read since they were loaded, the lost ones as far as they were asked before."""
        self._kept.ask(self._ask)
        return self._kept.counts

    def damaged_met(self) -> list[tuple[int, int]]:
        """Return (layer, expert) of every damaged expert that is known to have been used."""
        self._kept.ask(self._ask)
        return self._kept.damaged

    def record_routing(self) -> None:
        """Have every stage keep which experts its tokens choose; from now on the whole log is kept for it."""
        self._log.keeps_everything = True
        for stage in self._stages():
            self._ask(stage, "record_routing")

    def recorded_routing(self) -> list[tuple[int, int, npt.NDArray[np.int32]]]:
        """Return (step, layer, ids (tokens, k)) of all stages, step by step and layer by layer."""
        kept = [entry for stage in self._stages() for entry in self._ask(stage, "recorded_routing")]
        return sorted(kept, key=lambda entry: entry[:2])

    def _begin_snapshots(self) -> None:
        if self._snapshots_due and self._flights.are_sent:
            self._snapshots_due = False
            self._rounds.begin()

    def _gather(self) -> None:
        self._counts_due |= self._rounds.gather(self._flights.answered())

    def _ask(self, actor: ActorId, method: str, *arguments: Any) -> Any:
        """Call an actor and wait; one that is lost is replaced and asked again."""
        while True:
            try:
                return self._result_of(actor, self._actors.call(actor, method, *arguments))
            except ActorGone as lost:
                if not (isinstance(lost, AnswerLost) and self._processes.lives(actor)):
                    self._recover({actor})

    def _stages(self) -> list[ActorId]:
        return [ActorId("stage", number) for number in range(self.num_stages)]

    def _begin_sequence(self, session: int, tell: Callable[[ActorId], None]) -> None:
        """Tell every stage of a sequence that the log has already: whoever is replaced meanwhile learns it there."""
        before = self._processes.times.copy()
        try:
            for stage in self._stages():
                if self._processes.times[stage] == before[stage]:
                    try:
                        tell(stage)
                    except ActorGone:
                        self._recover({stage})
        except Failure:
            self._log.not_opened(session)
            raise

    def _recover(self, found: set[ActorId]) -> None:
        """Replace what is lost, until nothing is, and send the steps on their way on from where they were."""
        started, named, layer_steps, snapshots = time.monotonic(), list[ActorId](), 0, list[Restored]()
        lost, loads = self._processes.lost_now(found | self._unready), dict[ActorId, Any]()
        while lost or loads:
            lost = self._processes.with_mates(lost)
            named += sorted(lost)
            loads |= self._start(lost)
            answers_of = partial(self._result_of, fed=True)
            lost = self._flights.salvage(answers_of) - loads.keys()  # while the new processes load
            if lost:
                continue
            replays = plan_replays((stage.number for stage in loads), self._log, self._flights.answered())
            for stage, ticket in loads.items():
                replay = replays[stage.number]
                try:
                    self._processes.finish_start(stage, ticket)
                    if self._log.keeps_everything:
                        self._result_of(stage, self._actors.call(stage, "record_routing"))
                    repeat(self._actors, stage, replay, self._result_of)
                except ActorGone:
                    lost.add(stage)
                    continue
                self._unready.discard(stage)
                layer_steps += count_layer_steps(replay, self._actors.layers_of(stage.number))
                snapshots += [told for told in replay if isinstance(told, Restored)]
            loads = {}
        for number in self._flights.resend():
            self._rounds.forget(number)  # the snapshots asked for behind these steps were taken before them
        if named:
            nbytes = sum(told.snapshot.total_bytes for told in snapshots)
            self._processes.note(named, started, layer_steps, len(snapshots), nbytes)

    def _start(self, lost: set[ActorId]) -> dict[ActorId, Any]:
        self._unready |= lost
        for stage in lost:
            self._rounds.forget(stage.number)
        return self._processes.start(lost)
