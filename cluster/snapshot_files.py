"""A snapshot's pieces in a file without a name: gone with the last process that has it open, however that ends."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import BinaryIO, cast

import pyarrow as pa

from k3ray.workers.failure import Failure
from k3ray.workers.held_snapshot import MARK_BYTES, SnapshotPlace


class NoTemporaryRoom(Failure):
    """A temporary folder that does not take a state that is to be loaded."""


class SnapshotFile:
    """The pieces of one sequence in one stage, as they were given."""

    def __init__(self, pieces: Iterable[pa.Buffer] = ()) -> None:
        """Open the file and write the pieces one by one; OSError when the temporary folder (TMPDIR) has no room."""
        self._file = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115 - open as long as this object
        self._begin = 0
        self._sizes: list[int] = []
        for piece in pieces:
            self.add(piece)

    @classmethod
    def adopt(cls, place: SnapshotPlace) -> SnapshotFile:
        """Open what a stage of this host holds; it stays readable when the stage is gone.

        OSError when it is gone, or when what is there now is not what the stage has written.
        """
        found = cls.__new__(cls)
        found._file = place.path.open("rb")
        found._begin, found._sizes = MARK_BYTES, list(place.sizes)
        if found._file.read(MARK_BYTES) != place.mark:
            raise OSError(f"{place.path} is not the snapshot that a stage has written: is it on another host?")
        return found

    @classmethod
    def empty(cls, sizes: Iterable[int]) -> SnapshotFile:
        """Open a file for pieces of these sizes, whose bytes come by `write`."""
        found = cls()
        found._sizes = list(sizes)
        return found

    def write(self, contents: bytes | memoryview) -> None:
        """Write what comes next of the pieces; OSError when there is no room."""
        self._file.write(contents)
        self._file.flush()  # what has no room is told now, not when it is to be read

    def add(self, piece: pa.Buffer) -> None:
        """Write one more piece; OSError when there is no room."""
        self.write(memoryview(piece))
        self._sizes.append(piece.size)

    @property
    def total_bytes(self) -> int:
        """The size of all pieces."""
        return sum(self._sizes)

    def pieces(self) -> Iterator[pa.Buffer]:
        """Read them back, one at a time."""
        place = self._begin
        for size in self._sizes:
            self._file.seek(place)
            yield pa.py_buffer(self._file.read(size))
            place += size

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            with suppress(OSError):  # what had no room is still in its buffer
                self._file.close()


def deal_out(pieces: Iterable[tuple[int, pa.Buffer]], layers: Sequence[range]) -> tuple[SnapshotFile, ...]:
    """Write (layer, piece)s, one in memory at a time, into a file for each of the stages with these layers.

    Raises NoTemporaryRoom.
    """
    with _no_room_in_words():
        files = tuple(SnapshotFile() for _ in layers)
    for layer, message in pieces:
        for file, mine in zip(files, layers, strict=True):
            if layer in mine:
                with _no_room_in_words():
                    file.add(message)
    return files


@contextmanager
def _no_room_in_words() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise NoTemporaryRoom(
            f"the state that is loaded does not fit into {tempfile.gettempdir()} ({error.strerror}): make room there, "
            "or name another folder in TMPDIR"
        ) from None
