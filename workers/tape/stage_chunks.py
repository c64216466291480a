"""The chunks of one stage by their place in its order: some of them in memory, the rest through a ring."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

from k3ray.workers.tape.direct_io import Bytes, mapped
from k3ray.workers.tape.residency import Residency
from k3ray.workers.tape.ring import ChunkRing, RingStatistics
from k3ray.workers.tape.tape import Tape

_NO_RING = RingStatistics(0, 0, 0, 0, 0.0, 0, 0)


class StageChunks:
    """Maps its memory, loads the pinned chunks, and starts to read the first streamed ones ahead.

    Every chunk's checksum is proven when this process reads it for the first time. Raises DiskReadFailure, TapeError,
    or OSError where the system has no memory left.
    """

    def __init__(self, tape: Tape, residency: Residency, readers: int) -> None:
        chunks, sizes = residency.chunks, [tape.layout.chunks[number].nbytes for number in residency.chunks]
        pinned = residency.pinned_places
        ends = accumulate(sizes[place] for place in pinned)
        self._pinned = {place: slice(end - sizes[place], end) for place, end in zip(pinned, ends, strict=True)}
        streamed = [place for place in range(len(chunks)) if place not in self._pinned]
        self._turns = {place: turn for turn, place in enumerate(streamed)}
        self._memory = mapped(residency.pinned_bytes)  # touched by the loading threads, all at once

        def load(place: int) -> Bytes:
            return tape.read(chunks[place], self._memory[self._pinned[place]], check=True)

        with ThreadPoolExecutor(readers, thread_name_prefix="k3ray-pin") as threads:
            for _ in threads.map(load, pinned):
                pass
        self._ring: ChunkRing | None = None
        if streamed:
            self._ring = ChunkRing(
                len(streamed),
                residency.ring_chunks,
                tape.layout.chunk_bytes,
                readers,
                lambda turn, slot, first_time: tape.read(chunks[streamed[turn]], slot, check=first_time),
            )
            weakref.finalize(self, self._ring.stop)  # whoever drops it ends its readers

    def take(self, place: int) -> Bytes:
        """The chunk at a place; a streamed one in order only, waited for and valid until it is released."""
        if place in self._pinned:
            return self._memory[self._pinned[place]]
        assert self._ring is not None, "a place past the last chunk"
        return self._ring.take(self._turns[place])

    def release(self, place: int) -> None:
        """Let the buffer of a streamed chunk be read into again; a pinned one stays."""
        if place not in self._pinned:
            assert self._ring is not None, "a place past the last chunk"
            self._ring.release(self._turns[place])

    def pinned_run(self, pieces: list[tuple[int, int, int]]) -> Bytes | None:
        """The pieces (place, offset, nbytes) as one run of memory; None unless all are pinned, with nothing between."""
        if any(place not in self._pinned for place, _, _ in pieces):
            return None
        begins = [self._pinned[place].start + offset for place, offset, _ in pieces]
        ends = [begin + nbytes for begin, (_, _, nbytes) in zip(begins, pieces, strict=True)]
        return self._memory[begins[0] : ends[-1]] if begins[1:] == ends[:-1] else None

    def restart(self) -> None:
        """Give up the step: the next chunk to be used is the first one."""
        if self._ring is not None:
            self._ring.restart()

    def statistics(self) -> RingStatistics:
        """What was streamed so far."""
        return _NO_RING if self._ring is None else self._ring.statistics()

    def close(self) -> None:
        """End the readers."""
        if self._ring is not None:
            self._ring.close()
