"""A snapshot's pieces in a file without a name: gone with the last process that has it open, however that ends."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from typing import BinaryIO, cast

import pyarrow as pa

from k3ray.workers.held_snapshot import SnapshotPlace


class SnapshotFile:
    """The pieces of one sequence in one stage, as they were given."""

    def __init__(self, pieces: Iterable[pa.Buffer] = ()) -> None:
        """Open the file and write the pieces one by one; OSError when the temporary folder (TMPDIR) has no room."""
        self._file = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115 - open as long as this object
        self._sizes: list[int] = []
        for piece in pieces:
            self.add(piece)

    @classmethod
    def adopt(cls, place: SnapshotPlace) -> SnapshotFile:
        """Open what a stage of this host holds; it stays readable when the stage is gone. OSError when it is gone."""
        found = cls.__new__(cls)
        found._file = place.path.open("rb")
        found._sizes = list(place.sizes)
        return found

    def add(self, piece: pa.Buffer) -> None:
        """Write one more piece."""
        self._file.write(memoryview(piece))
        self._sizes.append(piece.size)

    def pieces(self) -> Iterator[pa.Buffer]:
        """Read them back, one at a time."""
        self._file.seek(0)
        for size in self._sizes:
            yield pa.py_buffer(self._file.read(size))

    def __del__(self) -> None:
        self._file.close()
