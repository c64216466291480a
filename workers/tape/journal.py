"""The journal of an unfinished tape: what it is of, and which chunks are on the disk with which checksum.

A line is written only after its chunk is on the disk, and believed only when the chunk's bytes still have its checksum,
so a kill at any moment costs the chunks since the last line and no more.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import msgspec

from k3ray.workers.failure import Failure
from k3ray.workers.tape.manifest import FORMAT_VERSION, TapeIdentity

JOURNAL_NAME = "journal"
_LINE = re.compile(rb"([0-9]{1,9}) ([0-9a-f]{8})\n")


class JournalFailure(Failure):
    """An unfinished tape that is not ours to go on with."""

    exit_code = 2


class Journal:
    """The journal of one folder, held by one process at a time; `finished` gives the checksum of each chunk in it."""

    def __init__(self, folder: Path, identity: TapeIdentity) -> None:
        """Begin or take up the journal; raises JournalFailure when it is another process's or another model's."""
        self._path = folder / JOURNAL_NAME
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._lock(folder)
            self.finished = self._take_up(folder, identity)
        except BaseException:
            os.close(self._descriptor)
            raise

    def append(self, chunks: Iterable[tuple[int, int]]) -> None:
        """Note chunks (number, checksum) that are on the disk."""
        self._write(b"".join(b"%d %08x\n" % chunk for chunk in chunks))

    def close(self) -> None:
        """Let go of the journal; another process may take it up."""
        os.close(self._descriptor)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lock(self, folder: Path) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JournalFailure(
                f"{folder}: another process is packing there; wait for it or name another place"
            ) from None
        except OSError:  # a file system without locks
            return

    def _take_up(self, folder: Path, identity: TapeIdentity) -> dict[int, int]:
        """Read what is there, cut off a line that was not finished, and begin the journal when it is empty."""
        mine = msgspec.json.encode((FORMAT_VERSION, identity)) + b"\n"
        text = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)
        first, newline, _ = text.partition(b"\n")
        if not newline:  # nothing, or a first line that was cut
            os.ftruncate(self._descriptor, 0)
            self._write(mine)
            return {}
        if first + newline != mine:
            raise JournalFailure(
                f"{folder}: holds the unfinished tape of another model, another chunk size or another version; "
                "remove it, or name another place"
            )
        finished: dict[int, int] = {}
        end = len(mine)
        while (line := _LINE.match(text, end)) is not None:
            finished[int(line[1])] = int(line[2], 16)
            end = line.end()
        os.ftruncate(self._descriptor, end)
        return finished

    def _write(self, text: bytes) -> None:
        os.lseek(self._descriptor, 0, os.SEEK_END)
        done = 0
        while done < len(text):
            done += os.write(self._descriptor, text[done:])
        os.fsync(self._descriptor)
