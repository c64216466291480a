"""The ring: every chunk once a turn and in order, whatever its size and its readers' pace; errors, never a hang."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from k3ray.workers.tape.direct_io import Bytes
from k3ray.workers.tape.ring import ChunkRing

SLOT_BYTES = 4096
NUM_CHUNKS = 7


class Disk:
    """Chunks of one repeated byte each; counts its reads, and fails or stands still where it is told to."""

    def __init__(self) -> None:
        self.reads: Counter[int] = Counter()
        self.first_times: list[int] = []
        self.failing: dict[int, BaseException] = {}
        self.pause: Callable[[int], None] = lambda place: None
        self._lock = threading.Lock()

    def read(self, place: int, slot: Bytes, first_time: bool) -> Bytes:
        self.pause(place)
        with self._lock:
            self.reads[place] += 1
            if first_time:
                self.first_times.append(place)
        if place in self.failing:
            raise self.failing[place]
        slot[:] = 10 + place
        return slot[: 100 + place]


@contextmanager
def ring_of(disk: Disk, slots: int, readers: int, chunks: int = NUM_CHUNKS) -> Iterator[ChunkRing]:
    ring = ChunkRing(chunks, slots, SLOT_BYTES, readers, disk.read)
    try:
        yield ring
    finally:
        ring.close()
        assert not any(reader.is_alive() for reader in ring._readers)


def use(ring: ChunkRing, places: range) -> None:
    """Use chunks as a step does: what is taken must hold still until it is released."""
    for place in places:
        first = ring.take(place)
        assert first.tobytes() == bytes([10 + place]) * (100 + place)
        assert ring.take(place) is first
        ring.release(place)


def settled(ring: ChunkRing, slots: int) -> None:
    """Wait until the readers have filled the ring and rest."""
    for _ in range(5000):
        if len(ring._ready) == min(slots, NUM_CHUNKS):
            return
        time.sleep(0.001)
    raise AssertionError("the ring was not filled")


@pytest.mark.parametrize("slots", [1, 2, 3, NUM_CHUNKS, 12])
@pytest.mark.parametrize("readers", [1, 2, 5])
def test_each_chunk_is_read_once_a_turn(slots: int, readers: int) -> None:
    disk, turns = Disk(), 4
    jitter = random.Random(slots)
    disk.pause = lambda place: time.sleep(jitter.random() * 2e-4)
    with ring_of(disk, slots, readers) as ring:
        for _ in range(turns):
            use(ring, range(NUM_CHUNKS))
        settled(ring, slots)
        expected = Counter(dict.fromkeys(range(NUM_CHUNKS), turns)) + Counter(range(min(slots, NUM_CHUNKS)))
        assert disk.reads == expected
        statistics = ring.statistics()
        assert statistics.reads == expected.total()
        assert statistics.bytes_read - statistics.bytes_ahead == turns * sum(100 + i for i in range(NUM_CHUNKS))
        assert (statistics.restarts, statistics.bytes_dropped) == (0, 0)
        assert sorted(disk.first_times) == list(range(NUM_CHUNKS))


def test_the_next_turn_is_read_ahead_across_the_end() -> None:
    disk = Disk()
    with ring_of(disk, 3, 1) as ring:
        use(ring, range(NUM_CHUNKS))
        settled(ring, 3)
        assert disk.reads == Counter({0: 2, 1: 2, 2: 2, 3: 1, 4: 1, 5: 1, 6: 1})


def test_a_single_chunk_goes_round() -> None:
    disk = Disk()
    with ring_of(disk, 1, 1, chunks=1) as ring:
        for _ in range(3):
            use(ring, range(1))


def test_a_held_chunk_is_not_written_over() -> None:
    disk = Disk()
    with ring_of(disk, 1, 1) as ring:
        held = ring.take(0)
        time.sleep(0.02)  # a reader that does not wait would be at chunk 1 now
        assert held.tobytes() == bytes([10]) * 100
        assert disk.reads == Counter({0: 1})


@pytest.mark.parametrize("slots", [1, 2, 3, 9])
@pytest.mark.parametrize("stop", range(1, NUM_CHUNKS + 1))
@pytest.mark.parametrize("held", [True, False])
def test_a_step_given_up_anywhere_begins_again(slots: int, stop: int, held: bool) -> None:
    disk = Disk()
    with ring_of(disk, slots, 2) as ring:
        use(ring, range(stop - 1))
        ring.take(stop - 1)
        if not held:
            ring.release(stop - 1)
        for _ in range(2):
            use(ring, range(NUM_CHUNKS))
        assert ring.statistics().restarts == (0 if stop == NUM_CHUNKS and not held else int((stop, held) != (1, True)))


def test_restarting_at_once_drops_what_was_ahead() -> None:
    disk = Disk()
    with ring_of(disk, 3, 2) as ring:
        ring.restart()
        assert ring.statistics().restarts == 0  # at the beginning there is nothing to give up
        use(ring, range(2))
        settled(ring, 3)
        ring.restart()
        statistics = ring.statistics()
        assert statistics.bytes_dropped == 102 + 103 + 104
        settled(ring, 3)
        assert disk.reads == Counter({0: 2, 1: 2, 2: 2, 3: 1, 4: 1})
        use(ring, range(NUM_CHUNKS))


@pytest.mark.parametrize("slots", [1, 2, 4, 9])
@pytest.mark.parametrize("failing", [0, 3, NUM_CHUNKS - 1])
def test_a_readers_error_is_raised_where_its_chunk_is_needed(slots: int, failing: int) -> None:
    disk = Disk()
    disk.failing[failing] = OSError(5, "a bad sector")
    with ring_of(disk, slots, 2) as ring:
        use(ring, range(failing))
        for _ in range(2):  # asking again does not help, and does not hang
            with pytest.raises(OSError, match="a bad sector"):
                ring.take(failing)
        del disk.failing[failing]  # the next step finds the disk mended
        use(ring, range(NUM_CHUNKS))
        assert ring.statistics().restarts >= 1


def test_after_an_error_nothing_more_is_read() -> None:
    disk = Disk()
    disk.failing[1] = OSError("a bad sector")
    with ring_of(disk, 4, 1) as ring:
        use(ring, range(1))
        with pytest.raises(OSError, match="a bad sector"):
            ring.take(1)
        time.sleep(0.02)
        assert disk.reads == Counter({0: 1, 1: 1})


def test_a_restart_waits_for_the_reads_under_way() -> None:
    disk, gate = Disk(), threading.Event()
    disk.pause = lambda place: (gate.wait(5) if place == 2 else None) and None
    with ring_of(disk, 3, 2) as ring:
        use(ring, range(1))
        while ring._reading != 1 or 1 not in ring._ready or 3 not in ring._ready:
            time.sleep(0.001)
        restarting = threading.Thread(target=ring.restart)
        restarting.start()
        restarting.join(0.05)
        assert restarting.is_alive()  # chunk 2 would be written into a buffer that belongs to another chunk by then
        gate.set()
        restarting.join(5)
        for _ in range(2):
            use(ring, range(NUM_CHUNKS))
        assert ring.statistics().bytes_dropped == 101 + 102 + 103


def test_of_two_errors_the_earlier_chunks_is_raised() -> None:
    disk = Disk()
    disk.failing = {2: OSError("second"), 1: OSError("first")}
    late = threading.Event()
    disk.pause = lambda place: (None if place != 1 else late.wait(5)) and None
    with ring_of(disk, 4, 3) as ring:
        use(ring, range(1))
        while disk.reads[2] == 0:
            time.sleep(0.001)
        late.set()
        with pytest.raises(OSError, match="first"):
            ring.take(1)


def test_chunks_out_of_order_are_our_own_mistake() -> None:
    disk = Disk()
    with ring_of(disk, 2, 1) as ring:
        with pytest.raises(RuntimeError, match="chunk 1 of the ring was asked for where chunk 0 comes next"):
            ring.take(1)
        with pytest.raises(RuntimeError, match="released without having been taken"):
            ring.release(1)
        use(ring, range(2))
        with pytest.raises(RuntimeError, match=r"chunk 1 .* where chunk 2"):
            ring.take(1)


def test_closing_ends_a_waiting_user() -> None:
    disk = Disk()
    gate = threading.Event()
    disk.pause = lambda place: gate.wait(5) and None
    ring = ChunkRing(NUM_CHUNKS, 2, SLOT_BYTES, 1, disk.read)
    caught: list[BaseException] = []

    def take() -> None:
        try:
            ring.take(0)
        except RuntimeError as error:
            caught.append(error)

    user = threading.Thread(target=take)
    user.start()
    closer = threading.Thread(target=ring.close)
    closer.start()
    user.join(5)
    gate.set()
    closer.join(5)
    assert not user.is_alive() and not closer.is_alive()
    assert "closed" in str(caught[0])
    ring.close()


def test_waiting_is_measured() -> None:
    disk = Disk()
    disk.pause = lambda place: time.sleep(0.003)
    with ring_of(disk, 1, 1) as ring:
        use(ring, range(3))
        statistics = ring.statistics()
        assert statistics.waits == 3
        assert statistics.wait_s > 0.003
