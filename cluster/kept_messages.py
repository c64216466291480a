"""Messages kept on the driver's disk until nobody refers to them, in files without a name: nothing can be left behind.

The memory of the log is thereby a page or two, whatever it holds. Where the disk takes nothing, messages are kept in
memory rather than lost.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

SEGMENT_BYTES = 8 << 20  # of one file, which goes when its last message does


class Segment:
    """One nameless file (TMPDIR), written from its beginning on."""

    def __init__(self) -> None:
        self._file: Any = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - open as long as a message is in it
        self.used_bytes = 0

    def write(self, view: memoryview) -> int:
        """Write at the end; returns where. OSError when there is no room."""
        place = self.used_bytes
        while view.nbytes:
            written = os.pwrite(self._file.fileno(), view, self.used_bytes)
            self.used_bytes += written
            view = view[written:]
        return place

    def read(self, place: int, size: int) -> bytes:
        """Read what was written there."""
        return os.pread(self._file.fileno(), size, place)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()


@dataclass(frozen=True, slots=True)
class KeptMessage:
    """One message. held: its bytes, where the disk did not take them; else they are in the segment."""

    size: int
    segment: Segment | None
    place: int
    held: bytes | None

    def read(self) -> pa.Buffer:
        """Return the bytes as they were given."""
        if self.held is not None:
            return pa.py_buffer(self.held)
        assert self.segment is not None
        contents = self.segment.read(self.place, self.size)
        assert len(contents) == self.size, "a file of our own is shorter than what was written to it"
        return pa.py_buffer(contents)


class MessageKeeper:
    """Gives messages their place."""

    def __init__(self) -> None:
        self._segment: Segment | None = None

    def keep(self, message: pa.Buffer) -> KeptMessage:
        """Copy a message."""
        view = memoryview(message).cast("B")
        try:
            if self._segment is None or self._segment.used_bytes >= SEGMENT_BYTES:
                self._segment = Segment()
            place = self._segment.write(view)
        except OSError:
            self._segment = None
            return KeptMessage(view.nbytes, None, 0, view.tobytes())
        return KeptMessage(view.nbytes, self._segment, place, None)

    def forget(self) -> None:
        """Begin a new file with the next message: nobody needs what is in the present one."""
        self._segment = None
