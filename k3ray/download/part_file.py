"""One file while it is fetched: bytes collected into blocks, written in place, journalled, and hashed in file order.

Every block is on its way to the disk before its journal line is; flush() may be called by another thread, so that an
interruption keeps every byte that has arrived.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from k3ray.download.block_journal import BLOCK_BYTES, Block, BlockJournal, digest_of
from k3ray.download.checksums import Checksum

SECONDS_PER_BLOCK = 2.0  # a slow line journals shorter blocks, so that a kill costs seconds, not minutes
SYNC_BYTES = 256 << 20


class PartClosed(Exception):
    """Bytes arrived for a part that was closed by an interruption."""


class PartFile:
    """Filled from byte 0 to the end in order: keep() takes a block that is there already, add() what arrives."""

    def __init__(self, path: Path, journal: BlockJournal, size: int, checksum: Checksum) -> None:
        self.path = path
        self.journal = journal
        self.size = size
        self.position = 0  # bytes of the file that are hashed
        self._checksum = checksum
        self._hash = checksum.start(size)
        self._buffer = bytearray()
        self._since = time.monotonic()
        self._unsynced = 0
        self._closed = False
        self._lock = threading.RLock()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        if os.fstat(self._descriptor).st_size > size:
            os.ftruncate(self._descriptor, size)

    def keep(self, block: Block) -> bool:
        """Whether the block at the position is in the file as journalled; then it counts as fetched."""
        assert block.begin == self.position and not self._buffer
        data = _read(self._descriptor, block.end - block.begin, block.begin)
        if len(data) != block.end - block.begin or digest_of(data) != block.digest:
            return False
        self._hash.update(data)
        self.position = block.end
        return True

    def add(self, piece: bytes) -> None:
        """Take bytes that arrived for the position; raises PartClosed or OSError."""
        with self._lock:
            if self._closed:
                raise PartClosed
            rest = memoryview(piece)
            while rest:
                room = BLOCK_BYTES - self.received % BLOCK_BYTES  # blocks end at multiples, wherever they begin
                self._buffer += rest[:room]
                rest = rest[room:]
                if self.received % BLOCK_BYTES == 0:
                    self.flush()
            if time.monotonic() - self._since > SECONDS_PER_BLOCK:
                self.flush()

    @property
    def received(self) -> int:
        """Where the next byte belongs."""
        return self.position + len(self._buffer)

    def flush(self) -> None:
        """Write and journal what has arrived; raises OSError and keeps nothing of it then."""
        with self._lock:
            self._since = time.monotonic()
            if not self._buffer or self._closed:
                return
            data, self._buffer = bytes(self._buffer), bytearray()
            _write(self._descriptor, data, self.position)
            self.journal.append(Block(self.position, self.position + len(data), digest_of(data)))
            self._hash.update(data)
            self.position += len(data)
            self._unsynced += len(data)
            if self._unsynced >= SYNC_BYTES:
                os.fdatasync(self._descriptor)
                self._unsynced = 0

    def digest(self) -> str:
        """The checksum's digest of the whole file, which is complete."""
        assert self.position == self.size and not self._buffer
        return self._hash.hexdigest()

    def start_again(self) -> None:
        """Forget every byte."""
        with self._lock:
            self.journal.clear()
            os.ftruncate(self._descriptor, 0)
            self._hash = self._checksum.start(self.size)
            self.position = 0
            self._buffer = bytearray()

    def sync(self) -> None:
        """Put the bytes on the disk."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close without writing; what was not flushed is lost."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._descriptor)
                self.journal.close()


def _read(descriptor: int, count: int, offset: int) -> bytes:
    pieces = []
    while count and (piece := os.pread(descriptor, count, offset)):
        pieces.append(piece)
        count -= len(piece)
        offset += len(piece)
    return b"".join(pieces)


def _write(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view = view[count:]
        offset += count
