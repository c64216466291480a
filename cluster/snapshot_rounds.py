"""Taking snapshots: asked of all stages at one place of the log, while steps go on behind; kept as they arrive.

A stage of the driver's host gives a file to open, one of another host is asked for its bytes (snapshot_pull.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from k3ray.cluster.actor_calls import ActorGone, ActorId, Actors
from k3ray.cluster.snapshot_files import SnapshotFile
from k3ray.cluster.snapshot_pull import SnapshotPull
from k3ray.cluster.step_log import Restored, StepLog
from k3ray.workers.failure import Failure


@dataclass(slots=True)
class Asked:
    """One stage's snapshots on their way: per session the ticket, then its pull, then its file. capacities: theirs."""

    place: int
    tickets: dict[int, Any]
    capacities: dict[int, int]
    pulls: dict[int, SnapshotPull] = field(default_factory=dict)
    files: dict[int, SnapshotFile] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether every session's file is there."""
        return not self.tickets and not self.pulls


class SnapshotRounds:
    """At most one round is on its way. A stage that fails in it keeps the restore point that it had."""

    def __init__(self, actors: Actors, log: StepLog, is_near: Callable[[ActorId], bool] = lambda stage: True) -> None:
        """is_near: whether a stage's files can be opened here."""
        self._actors = actors
        self._log = log
        self._is_near = is_near
        self._asked: dict[int, Asked] = {}
        self._whole: dict[int, tuple[Restored, ...]] = {}
        self.since = 0  # where the last round was begun
        self.taken = 0
        self.pulled_bytes = 0  # from other hosts
        self.refused = ""  # why the last snapshot that could not be kept was not

    def begin(self) -> None:
        """Ask every stage for the sequences that have changed; the calls stand in its queue behind the steps sent."""
        if self._asked:
            return
        self.since = self._log.place
        for stage in range(self._actors.num_stages):
            sessions = self._log.changed_since_point(stage)
            tickets = {session: self._actors.call(ActorId("stage", stage), "snapshot", session) for session in sessions}
            self._asked[stage] = Asked(self.since, tickets, {session: self._log.open[session] for session in sessions})

    def gather(self, answered: Mapping[int, int]) -> bool:
        """Keep what has arrived, without waiting; returns whether a round is complete with it.

        answered: for every step on its way (by its place in the log) how many stages' answers are here. A snapshot
        behind a step whose answer is not yet here is not kept before that: were the stage and the answer lost
        together, nobody could compute it any more.
        """
        was_on_its_way = bool(self._asked)
        for stage, asked in list(self._asked.items()):
            if not asked.capacities.keys() <= self._log.open.keys():
                del self._asked[stage]  # a sequence was closed meanwhile, and its stage has let go of the file
                continue
            try:
                self._take(ActorId("stage", stage), asked)
            except ActorGone:
                del self._asked[stage]  # whoever calls the stage next finds it lost
            except (Failure, OSError) as error:  # a sequence that a failed step has broken; no room; a broken pull
                self.refused = str(error)
                del self._asked[stage]
            else:
                if asked.is_whole and all(place > asked.place or count > stage for place, count in answered.items()):
                    del self._asked[stage]
                    self._keep(stage, asked)
        if was_on_its_way and not self._asked:
            self._note_whole()
            return True
        return False

    def forget(self, stage: int) -> None:
        """Drop what was asked of a stage that is replaced."""
        self._asked.pop(stage, None)

    def loaded(self, session: int, whole: tuple[Restored, ...]) -> None:
        """Note that a sequence began from a saved state, by stage."""
        self._whole[session] = whole

    def closed(self, session: int) -> None:
        """Let go of what is kept of a sequence for the case that the run cannot go on."""
        self._whole.pop(session, None)

    def whole(self, session: int) -> tuple[Restored, ...]:
        """Return the last state of a sequence that is of one moment in all stages, by stage; empty: there is none."""
        return self._whole.get(session, ())

    def _take(self, stage: ActorId, asked: Asked) -> None:
        for session, ticket in list(asked.tickets.items()):
            if not self._actors.is_done(ticket, 0.0):
                continue
            place = self._actors.result(ticket)
            if self._is_near(stage):
                asked.files[session] = SnapshotFile.adopt(place)
            else:
                asked.pulls[session] = SnapshotPull(self._actors, stage, session, place)
            del asked.tickets[session]
        for session, pull in list(asked.pulls.items()):
            before = pull.pulled_bytes
            file = pull.advance()
            self.pulled_bytes += pull.pulled_bytes - before
            if file is not None:
                asked.files[session] = file
                del asked.pulls[session]

    def _keep(self, stage: int, asked: Asked) -> None:
        snapshots = {
            session: Restored(session, asked.capacities[session], file) for session, file in asked.files.items()
        }
        self._log.keep_point(stage, asked.place, snapshots)
        self.taken += len(snapshots)

    def _note_whole(self) -> None:
        """After a round: the stages' restore points are of one moment, unless one of them could not be kept."""
        points = [self._log.point(stage) for stage in range(self._actors.num_stages)]
        if len({point.place for point in points}) > 1:
            return
        for session in self._log.open:
            if all(session in point.sequences for point in points):
                self._whole[session] = tuple(point.sequences[session] for point in points)
