"""Taking snapshots: asked of all stages at one place of the log, while steps go on behind; kept as they arrive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from k3ray.cluster.actor_calls import ActorGone, ActorId, Actors
from k3ray.cluster.snapshot_files import SnapshotFile
from k3ray.cluster.step_log import Restored, StepLog
from k3ray.workers.failure import Failure


@dataclass(frozen=True, slots=True)
class Asked:
    """One stage's snapshots on their way: per session the ticket. capacities: of these sessions."""

    place: int
    tickets: dict[int, Any]
    capacities: dict[int, int]


class SnapshotRounds:
    """At most one round is on its way. A stage that fails in it keeps the restore point that it had."""

    def __init__(self, actors: Actors, log: StepLog) -> None:
        self._actors = actors
        self._log = log
        self._asked: dict[int, Asked] = {}
        self.since = 0  # where the last round was begun
        self.taken = 0
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

    def gather(self) -> bool:
        """Keep what has arrived, without waiting; returns whether a round is complete with it."""
        was_on_its_way = bool(self._asked)
        for stage, asked in list(self._asked.items()):
            if all(self._actors.is_done(ticket, 0.0) for ticket in asked.tickets.values()):
                del self._asked[stage]
                self._keep(stage, asked)
        return was_on_its_way and not self._asked

    def forget(self, stage: int) -> None:
        """Drop what was asked of a stage that is replaced."""
        self._asked.pop(stage, None)

    def _keep(self, stage: int, asked: Asked) -> None:
        if not asked.tickets.keys() <= self._log.open.keys():
            return  # a sequence was closed meanwhile, and its stage has let go of the file
        snapshots = {}
        try:
            for session, ticket in asked.tickets.items():
                pieces = SnapshotFile.adopt(self._actors.result(ticket))
                snapshots[session] = Restored(session, asked.capacities[session], pieces)
        except ActorGone:
            return  # whoever calls the stage next finds it lost
        except (Failure, OSError) as error:  # a sequence that a failed step has broken; no room for the file
            self.refused = str(error)
            return
        self._log.keep_point(stage, asked.place, snapshots)
        self.taken += len(snapshots)
