"""What a download has done so far, counted by many threads: bytes that came, that were here, that came needlessly."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reached:
    """One look at a download. here: bytes of the wanted files that are on the disk; of: all of them.

    fetched: bytes that arrived. again: bytes that arrived although they were here, from a server that ignores ranges.
    """

    here: int
    of: int
    fetched: int
    again: int
    files_done: int
    num_files: int


class Counts:
    """The counters; every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._here = self._of = self._fetched = self._again = self._done = self._files = 0

    def expect(self, files: int, total: int, here: int) -> None:
        """Add files to the work, of which some bytes are here already."""
        with self._lock:
            self._files += files
            self._of += total
            self._here += here

    def fetched(self, count: int) -> None:
        """Bytes that arrived and belong to the file."""
        with self._lock:
            self._fetched += count
            self._here += count

    def found(self, count: int) -> None:
        """Bytes that were here and are proven now."""
        with self._lock:
            self._here += count

    def lost(self, count: int) -> None:
        """Bytes that were counted as here and are not the file's."""
        with self._lock:
            self._here -= count

    def skipped(self, count: int) -> None:
        """Bytes that arrived although they are here."""
        with self._lock:
            self._again += count

    def finished(self) -> None:
        """One file more is whole and proven."""
        with self._lock:
            self._done += 1

    def reached(self) -> Reached:
        """How far it is."""
        with self._lock:
            return Reached(self._here, self._of, self._fetched, self._again, self._done, self._files)
