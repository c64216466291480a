"""The ring: chunks read in a circle by reader threads, ahead of the one who uses them in order.

Every turn of the circle reads each chunk once, and reading goes on across the turn's end. It does not know what a chunk
holds, or where it is read from.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from k3ray.workers.tape.direct_io import Bytes, prefaulted

ReadChunk = Callable[[int, Bytes, bool], Bytes]  # (place in the circle, slot, first time) -> the chunk in the slot


@dataclass(frozen=True, slots=True)
class RingStatistics:
    """Counted at the readers. bytes_ahead: of bytes_read, waiting in the ring to be used.

    bytes_dropped: read for a step that was given up. wait_s: how long the user of the chunks stood still.
    """

    reads: int
    bytes_read: int
    bytes_ahead: int
    bytes_dropped: int
    wait_s: float
    waits: int
    restarts: int


class ChunkRing:
    """`num_chunks` chunks in a circle through `num_slots` buffers, read by `num_readers` threads.

    `take` and `release` belong to one thread. A chunk's sequence number counts on from turn to turn.
    """

    def __init__(self, num_chunks: int, num_slots: int, slot_bytes: int, num_readers: int, read: ReadChunk) -> None:
        self._num_chunks = num_chunks
        self._read = read
        num_slots = min(num_slots, num_chunks)  # more would read a chunk again before it was used
        memory = prefaulted(num_slots * slot_bytes)
        self._slots = [memory[slot * slot_bytes : (slot + 1) * slot_bytes] for slot in range(num_slots)]
        self._condition = threading.Condition()
        self._ready: dict[int, Bytes] = {}
        self._seen = [False] * num_chunks
        self._claimed = 0  # sequence number of the next chunk to be read
        self._used = 0  # sequence number of the next chunk to be used, or in use
        self._reading = 0
        self._failure: tuple[int, BaseException] | None = None  # of the earliest chunk that cannot be read
        self._raised = False
        self._restarting = False
        self._closed = False
        self._reads = self._bytes_read = self._bytes_dropped = self._waits = self._restarts = 0
        self._wait_s = 0.0
        self._readers = [
            threading.Thread(target=self._serve, name=f"k3ray-tape-{number + 1}", daemon=True)
            for number in range(min(num_readers, num_slots))
        ]
        for reader in self._readers:
            reader.start()

    def take(self, place: int) -> Bytes:
        """The chunk at a place of the circle, waited for; valid until it is released, and the same until then.

        Places are taken in order. Asking for the first one elsewhere gives up the turn: what was read for it is
        dropped and the circle begins again. Raises what the reader of this chunk raised, here and at every later call
        of the same turn.
        """
        with self._condition:
            if place == 0 and (self._used % self._num_chunks or self._raised):
                self._restart()
            if place != self._used % self._num_chunks:
                expected = self._used % self._num_chunks
                raise RuntimeError(f"chunk {place} of the ring was asked for where chunk {expected} comes next")
            if self._used not in self._ready:
                self._wait()
            return self._ready[self._used]

    def release(self, place: int) -> None:
        """Give the taken chunk's buffer back to the readers."""
        with self._condition:
            if place != self._used % self._num_chunks or self._used not in self._ready:
                raise RuntimeError(f"chunk {place} of the ring was released without having been taken")
            del self._ready[self._used]
            self._used += 1
            self._condition.notify_all()

    def restart(self) -> None:
        """Give the turn up and begin the circle again; does nothing at its beginning."""
        with self._condition:
            if self._used % self._num_chunks or self._raised:
                self._restart()

    def statistics(self) -> RingStatistics:
        """What was read so far."""
        with self._condition:
            ahead = sum(chunk.nbytes for chunk in self._ready.values())
            return RingStatistics(
                self._reads, self._bytes_read, ahead, self._bytes_dropped, self._wait_s, self._waits, self._restarts
            )

    def stop(self) -> None:
        """Tell the readers to end, and do not wait for them: this may be called from anywhere, also by a reader."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def close(self) -> None:
        """End the readers; returns when the reads under way have ended. Closing twice does nothing."""
        self.stop()
        for reader in self._readers:
            reader.join()

    def _wait(self) -> None:
        """Wait for the chunk to be used next. Holds the condition."""
        started = time.perf_counter()
        self._waits += 1
        while self._used not in self._ready:
            if self._failure is not None and self._failure[0] == self._used:
                self._raised = True
                raise self._failure[1]
            if self._closed:
                raise RuntimeError("the ring is closed")
            self._condition.wait()
        self._wait_s += time.perf_counter() - started

    def _restart(self) -> None:
        """Drop everything and begin the turn again. Holds the condition."""
        self._restarting = True
        try:
            while self._reading:
                self._condition.wait()
        finally:
            self._restarting = False
        self._bytes_dropped += sum(chunk.nbytes for chunk in self._ready.values())
        self._ready.clear()
        self._used -= self._used % self._num_chunks
        self._claimed = self._used
        self._failure, self._raised = None, False
        self._restarts += 1
        self._condition.notify_all()

    def _serve(self) -> None:
        """A reader's life: claim the next chunk when a buffer is free, read it."""
        while True:
            with self._condition:
                while not self._closed and not self._may_claim():
                    self._condition.wait()
                if self._closed:
                    return
                sequence = self._claimed
                self._claimed += 1
                self._reading += 1
            place = sequence % self._num_chunks
            chunk: Bytes | None = None
            try:
                chunk = self._read(place, self._slots[sequence % len(self._slots)], not self._seen[place])
            except BaseException as error:  # noqa: BLE001 - raised by take, in the thread that needs the chunk
                failure = (sequence, error)
            with self._condition:
                self._reading -= 1
                if chunk is not None:
                    self._ready[sequence] = chunk
                    self._seen[place] = True
                    self._reads += 1
                    self._bytes_read += chunk.nbytes
                elif self._failure is None or sequence < self._failure[0]:
                    self._failure = failure
                self._condition.notify_all()

    def _may_claim(self) -> bool:
        """Whether a buffer is free and nothing has failed. Holds the condition."""
        free = self._claimed < self._used + len(self._slots)
        return free and self._failure is None and not self._restarting
