"""A snapshot that a stage has written for whoever asked: a file without a name, so that nothing can be left behind.

A released stage's state may take a gigabyte: it goes to the disk piece by piece. Processes of the same host read the
file itself; others are sent it in chunks, each under a digest of its own.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa

from k3ray.workers.failure import Failure

MARK_BYTES, DIGEST_BYTES = 16, 16
CHUNK_BYTES = 4 << 20  # the most that one answer carries


class SnapshotGone(Failure):
    """A snapshot that was let go of while it was read: its sequence was closed, or snapshot again."""


@dataclass(frozen=True, slots=True)
class SnapshotPlace:
    """Where the pieces can be read while the stage holds the file open.

    path: on the stage's host. mark: what the file begins with, before the pieces: another host, or another container,
    may have something else under that path. digest: BLAKE2b of all pieces.
    """

    path: Path
    mark: bytes
    sizes: tuple[int, ...]
    digest: bytes

    @property
    def total_bytes(self) -> int:
        """The size of all pieces."""
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class SnapshotChunk:
    """A run of the pieces' bytes. digest: BLAKE2b of them and of where they begin."""

    contents: bytes
    digest: bytes


def chunk_digest(offset: int, contents: bytes) -> bytes:
    """Return what proves that a chunk is whole and at its place."""
    return hashlib.blake2b(offset.to_bytes(8, "little") + contents, digest_size=DIGEST_BYTES).digest()


class HeldSnapshot:
    """The pieces of one sequence in a nameless file (TMPDIR), there as long as this object or a reader has it open."""

    def __init__(self, pieces: Iterable[pa.Buffer]) -> None:
        """Write the pieces one by one; OSError when the temporary folder has no room."""
        self._file = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115 - open as long as this object
        self._mark, digest, sizes = secrets.token_bytes(MARK_BYTES), hashlib.blake2b(digest_size=DIGEST_BYTES), []
        self._file.write(self._mark)
        for piece in pieces:
            sizes.append(self._file.write(memoryview(piece)))
            digest.update(memoryview(piece))
        self._file.flush()
        self._sizes, self._digest = tuple(sizes), digest.digest()

    @property
    def place(self) -> SnapshotPlace:
        """Return where it can be read."""
        path = Path(f"/proc/{os.getpid()}/fd/{self._file.fileno()}")
        return SnapshotPlace(path, self._mark, self._sizes, self._digest)

    def chunk(self, offset: int) -> SnapshotChunk:
        """Return at most CHUNK_BYTES of the pieces from `offset` on; SnapshotGone when it was closed.

        For a thread beside the one that works on the steps.
        """
        try:
            contents = os.pread(self._file.fileno(), CHUNK_BYTES, MARK_BYTES + offset)
        except (ValueError, OSError) as error:  # closed, or closed between the two calls
            raise SnapshotGone(f"a snapshot was let go of while it was read: {error}") from None
        return SnapshotChunk(contents, chunk_digest(offset, contents))

    def close(self) -> None:
        """Let go of the file; who has opened it can still read it."""
        self._file.close()

    def __del__(self) -> None:
        self.close()
