"""A snapshot that a stage has written for whoever asked: a file without a name, so that nothing can be left behind.

A released stage's state may take a gigabyte: it goes to the disk piece by piece and never through a message.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa


@dataclass(frozen=True, slots=True)
class SnapshotPlace:
    """Where the pieces can be read by processes of the same host, while the stage holds the file open."""

    path: Path
    sizes: tuple[int, ...]


class HeldSnapshot:
    """The pieces of one sequence in a nameless file (TMPDIR), there as long as this object or a reader has it open."""

    def __init__(self, pieces: Iterable[pa.Buffer]) -> None:
        """Write the pieces one by one; OSError when the temporary folder has no room."""
        self._file = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115 - open as long as this object
        self._sizes = tuple(self._file.write(memoryview(piece)) for piece in pieces)
        self._file.flush()

    @property
    def place(self) -> SnapshotPlace:
        """Return where it can be read."""
        return SnapshotPlace(Path(f"/proc/{os.getpid()}/fd/{self._file.fileno()}"), self._sizes)

    def close(self) -> None:
        """Let go of the file; who has opened it can still read it."""
        self._file.close()

    def __del__(self) -> None:
        self.close()
