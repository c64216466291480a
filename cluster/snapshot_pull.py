"""One snapshot on its way from a stage of another host: asked for in chunks aside of the steps, each proven, written.

Nothing here waits: `advance` takes what has arrived. The file is used only when its last byte has come and the whole
has the stage's digest.
"""

from __future__ import annotations

import hashlib
from collections import deque
from typing import Any

from k3ray.cluster.actor_calls import ActorId, Actors
from k3ray.cluster.snapshot_files import SnapshotFile
from k3ray.workers.failure import Failure
from k3ray.workers.held_snapshot import CHUNK_BYTES, DIGEST_BYTES, SnapshotPlace, chunk_digest

AHEAD = 2  # chunks of one snapshot asked for at a time: bounds what is on its way


class PullBroken(Failure):
    """A snapshot that arrived cut or changed."""


class SnapshotPull:
    """The snapshot of one sequence in one stage, until it is whole."""

    def __init__(self, actors: Actors, stage: ActorId, session: int, place: SnapshotPlace) -> None:
        """Begin to ask; OSError when the driver's temporary folder (TMPDIR) cannot have the file."""
        self._actors = actors
        self._stage = stage
        self._session = session
        self._place = place
        self._file = SnapshotFile.empty(place.sizes)
        self._digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._tickets: deque[Any] = deque()
        self._asked = self.pulled_bytes = 0
        self._ask()

    def advance(self) -> SnapshotFile | None:
        """Take what has arrived and ask for more; returns the file when it is whole.

        Raises PullBroken, OSError when there is no room, and what a call raises (ActorGone, SnapshotGone).
        """
        while self._tickets and self._actors.is_done(self._tickets[0], 0.0):
            chunk = self._actors.result(self._tickets.popleft())
            expected = min(CHUNK_BYTES, self._place.total_bytes - self.pulled_bytes)
            if len(chunk.contents) != expected or chunk.digest != chunk_digest(self.pulled_bytes, chunk.contents):
                raise PullBroken(
                    f"a snapshot of {self._stage}: found {len(chunk.contents)} bytes from {self.pulled_bytes} on with "
                    f"another digest or length, expected {expected}: the one before stays in force"
                )
            self._file.write(chunk.contents)
            self._digest.update(chunk.contents)
            self.pulled_bytes += expected
            self._ask()
        if self._tickets:
            return None
        if self._digest.digest() != self._place.digest:
            raise PullBroken(
                f"a snapshot of {self._stage} arrived with other bytes than were written: its digest differs"
            )
        return self._file

    def _ask(self) -> None:
        while len(self._tickets) < AHEAD and self._asked < self._place.total_bytes:
            ticket = self._actors.call_aside(self._stage, "snapshot_chunk", self._session, self._asked)
            self._tickets.append(ticket)
            self._asked += CHUNK_BYTES
