"""Writes chunks to their places in an unfinished tape, past the page cache where the disk allows it.

A packed trunk is larger than most memories: through the page cache it would push out everything else of the host.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from k3ray.workers.tape.direct_io import PAGE_BYTES, Bytes

_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)


class ChunkWriter:
    """One file open for writing whole pages from any thread; every method raises OSError."""

    def __init__(self, path: Path, say: Callable[[str], None] = lambda line: None) -> None:
        self._path = path
        self._say = say
        self._lock = threading.Lock()
        self._descriptors: list[int] = []
        self._direct = True
        try:
            self._open(os.O_DIRECT)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            self._fall_back(error)

    def write(self, data: Bytes, offset: int) -> None:
        """Write whole pages, from memory that begins on a page, at a page of the file."""
        view = data.data
        done = 0
        while done < data.nbytes:
            descriptor = self._descriptors[-1]
            try:
                count = os.pwrite(descriptor, view[done:], offset + done)
            except OSError as error:
                with self._lock:
                    if error.errno in _REFUSALS and self._direct:
                        self._fall_back(error)
                if error.errno in _REFUSALS and descriptor != self._descriptors[-1]:
                    continue
                raise
            # a disk that fills up takes a part, and says why only when asked for the rest
            done += count - count % PAGE_BYTES if self._direct else count

    def sync(self) -> None:
        """Return when everything written so far is on the disk."""
        os.fdatasync(self._descriptors[-1])

    def close(self) -> None:
        """Close the file."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def __enter__(self) -> ChunkWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, flags: int) -> None:
        self._descriptors.append(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, 0o666))

    def _fall_back(self, error: OSError) -> None:
        self._open(0)
        self._direct = False
        self._say(f"{self._path.parent}: this disk refuses O_DIRECT ({error.strerror}); written through the page cache")
