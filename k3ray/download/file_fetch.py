"""Fetches one file whole: what is there is proven, what is missing is asked for, and the whole is compared at the end.

In the order of the file: a journalled block is read and compared with its digest, a hole is fetched. So the checksum
of the whole file is known the moment its last byte is, and no byte that is proven is fetched again.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

from k3ray.download.answers import IgnoredRange, Transient, WantedBytes
from k3ray.download.block_journal import BlockJournal
from k3ray.download.hub import HubFile, Listing
from k3ray.download.part_file import PartFile
from k3ray.download.patience import Patience
from k3ray.download.stream import LEAST_BYTES, Line, Sink, Stopped, stream
from k3ray.download.workplace import Workplace, telling_disk
from k3ray.workers.failure import Failure

WHOLE_ATTEMPTS = 3
RANGE_ATTEMPTS = 3


class FetchFailed(Failure):
    """One file could not be fetched; the others may be. may_pass: the line broke, which another time it may not."""

    def __init__(self, name: str, message: str, may_pass: bool) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name
        self.may_pass = may_pass


def wait(line: Line, seconds: float) -> None:
    """Wait, unless the download is interrupted: then Stopped."""
    if line.stop.wait(seconds):
        raise Stopped


class FileFetch:
    """The work on one file, done by run() in one thread; part is there while it runs."""

    def __init__(
        self,
        workplace: Workplace,
        listing: Listing,
        file: HubFile,
        line: Line,
        patience: Patience,
        sink: Sink,
        say: Callable[[str], None],
    ) -> None:
        self.file = file
        self.part: PartFile | None = None
        self._workplace = workplace
        self._listing = listing
        self._line = line
        self._patience = patience
        self._sink = sink
        self._say = say
        self._chance = random.Random()

    def run(self) -> None:
        """Fetch what is missing and put the whole, proven file in its place.

        Raises FetchFailed, AccessRefused, NoSpace, Stopped, PartClosed.
        """
        with telling_disk(self._workplace.directory, self.file.name):
            path = self._workplace.part(self.file.name)
            journal = BlockJournal(self._workplace.journal(self.file.name), self.file.size, self.file.checksum)
            if not path.exists():  # its journal is of a file that is gone
                journal.clear()
            self.part = PartFile(path, journal, self.file.size, self.file.checksum)
            try:
                self._fetch_proven(self.part)
                self.part.sync()
            finally:
                self.part.close()
            path.replace(self._workplace.final(self.file.name))
            _sync_folder(self._workplace.directory)

    def _fetch_proven(self, part: PartFile) -> None:
        """Fetch until the whole file has the checksum; from the first byte again when it has not."""
        for attempt in range(1, WHOLE_ATTEMPTS + 1):
            self._fill(part)
            found = part.digest()
            if found == self.file.checksum.value:
                return
            self._sink.lost(part.size)
            self._say(
                f"{self.file.name}: complete, and its {self.file.checksum.kind} is {found}, expected "
                f"{self.file.checksum.value}: attempt {attempt} of {WHOLE_ATTEMPTS} is thrown away"
            )
            part.start_again()
        raise FetchFailed(
            self.file.name,
            f"{self._line.hub.host} sent {self.file.size} bytes with another content {WHOLE_ATTEMPTS} times, expected "
            f"{self.file.checksum}; use another --endpoint",
            may_pass=False,
        )

    def _fill(self, part: PartFile) -> None:
        for block in list(part.journal.blocks):
            self._fetch_hole(part, block.begin)
            if not part.keep(block):
                self._sink.lost(block.end - block.begin)
                self._say(f"{self.file.name}: bytes {block.begin}-{block.end - 1} are not what was written: again")
                self._fetch_hole(part, block.end)
            if self._line.stop.is_set():
                raise Stopped
        self._fetch_hole(part, part.size)

    def _fetch_hole(self, part: PartFile, end: int) -> None:
        """Fetch from the part's position to `end`, however often the line breaks."""
        failures = ignored = 0
        url = self._line.hub.url(self._listing.repository, self._listing.commit, self.file.name)
        while part.position < end:
            begin = part.position
            wanted = WantedBytes(self.file.name, begin, end, self.file.size, self.file.checksum, self._listing.commit)
            try:
                stream(self._line, url, wanted, part, self._sink, ignored >= RANGE_ATTEMPTS)
            except Transient as error:
                failures = 1 if part.position - begin >= LEAST_BYTES else failures + 1
                if isinstance(error, IgnoredRange):
                    ignored += 1
                    if ignored == RANGE_ATTEMPTS:
                        self._say(f"{self.file.name}: {error}, {ignored} times: its first {begin} bytes come again")
                        continue
                self._patient(error, failures, part)

    def _patient(self, error: Transient, failures: int, part: PartFile) -> None:
        """Wait before the next attempt, or give the file up."""
        if failures >= self._patience.attempts:
            raise FetchFailed(
                self.file.name,
                f"given up at byte {part.position} of {self.file.size} after {failures} attempts "
                f"without progress, the last: {error}; what is here is kept, run the same command again",
                may_pass=True,
            )
        seconds = self._patience.wait_s(failures, error.retry_after_s, self._chance)
        if failures > 1 or error.retry_after_s is not None:
            self._say(f"{self.file.name}: {error}; again at byte {part.position} in {seconds:.1f} s")
        wait(self._line, seconds)


def _sync_folder(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError:  # some file systems refuse it, and the file itself is safe
        pass
    finally:
        os.close(descriptor)
