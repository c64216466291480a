"""The whole life of one wanted file: kept when it is proven, proven when it is here, fetched when it is not.

A file that is here and is not the repository's becomes the part that is fetched, so that its journal can tell which of
its blocks are still right.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from k3ray.download.block_journal import read_blocks
from k3ray.download.checksums import hash_file
from k3ray.download.counts import Counts
from k3ray.download.file_fetch import FetchFailed, FileFetch
from k3ray.download.hub import HubFile, Listing
from k3ray.download.patience import Patience
from k3ray.download.record import Record, write_record
from k3ray.download.stream import Line, Stopped
from k3ray.download.workplace import Workplace, telling_disk


@dataclass(slots=True)
class Notes:
    """The folder's record, changed by several threads."""

    workplace: Workplace
    record: Record
    lock: threading.Lock = field(default_factory=threading.Lock)

    def finish(self, name: str) -> None:
        """Note on the disk that a file's checksum is right."""
        with self.lock:
            self.record = self.record.with_finished(self.workplace.directory, name)
            write_record(self.workplace.directory, self.record)


@dataclass(frozen=True, slots=True)
class Setting:
    """What all jobs of one download share."""

    workplace: Workplace
    listing: Listing
    line: Line
    patience: Patience
    counts: Counts
    notes: Notes
    say: Callable[[str], None]


class FileJob:
    """One file's job; run() in one thread, halt() from another."""

    def __init__(self, setting: Setting, file: HubFile) -> None:
        self.file = file
        self._setting = setting
        self._fetch: FileFetch | None = None

    def expect(self) -> None:
        """Count the file among the work, once."""
        here = 0 if self._is_here() else self._setting.workplace.bytes_here(self.file)
        self._setting.counts.expect(1, self.file.size, here)

    def run(self) -> None:
        """Prove or fetch the file; raises what FileFetch.run raises."""
        with telling_disk(self._setting.workplace.directory, self.file.name):
            self._run()

    def _run(self) -> None:
        counts, name = self._setting.counts, self.file.name
        if not (self._is_here() and self._is_right()):
            self._take_over()
            fetch = self._fetch = FileFetch(
                self._setting.workplace,
                self._setting.listing,
                self.file,
                self._setting.line,
                self._setting.patience,
                counts,
                self._setting.say,
            )
            fetch.run()
        self._setting.notes.finish(name)
        counts.finished()

    def halt(self) -> None:
        """Keep what has arrived, and let nothing more be written."""
        part = self._fetch.part if self._fetch is not None else None
        if part is not None:
            try:
                part.flush()
            finally:
                part.close()

    def _is_here(self) -> bool:
        path = self._setting.workplace.final(self.file.name)
        return path.is_file() and path.stat().st_size == self.file.size

    def _is_right(self) -> bool:
        """Whether the file that is here has the checksum; it is read whole."""
        seen = 0

        def read(count: int) -> None:
            nonlocal seen
            seen += count
            self._setting.counts.found(count)
            if self._setting.line.stop.is_set():
                raise Stopped

        found = hash_file(self._setting.workplace.final(self.file.name), self.file.checksum, read)
        if found == self.file.checksum.value:
            return True
        self._setting.counts.lost(seen)
        self._setting.say(
            f"{self.file.name}: here with the right size, and its {self.file.checksum.kind} is {found}, expected "
            f"{self.file.checksum.value}: what is wrong of it is fetched again"
        )
        return False

    def _take_over(self) -> None:
        """Make a wrong file at the place the part, unless a part has something in it, or the file is a link's."""
        workplace, file = self._setting.workplace, self.file
        final, part = workplace.final(file.name), workplace.part(file.name)
        if final.is_dir() and not final.is_symlink():
            raise FetchFailed(file.name, f"a folder is in its place in {final.parent}; move it away", may_pass=False)
        if not workplace.owns(file.name) or workplace.bytes_here(file):
            return
        if final.stat().st_size != file.size:
            self._setting.say(f"{file.name}: here with {final.stat().st_size} bytes, expected {file.size}: again")
        final.replace(part)
        blocks = read_blocks(workplace.journal(file.name), file.size, file.checksum)
        self._setting.counts.found(sum(block.end - block.begin for block in blocks))
