"""Downloads a checkpoint, or part of one, into a folder: what to fetch is decided here, and the order of the work.

Small files first (they say which shards there are), then room is made sure of, then the shards, several at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from k3ray.cluster.signals import unwinding_signals
from k3ray.download.counts import Counts, Reached
from k3ray.download.crew import run_jobs
from k3ray.download.file_fetch import FetchFailed
from k3ray.download.file_job import FileJob, Notes, Setting
from k3ray.download.hub import Hub, HubFile, HubRefused, Listing
from k3ray.download.patience import Patience
from k3ray.download.record import FOLDER, Record, new_record, read_record, write_record
from k3ray.download.revision import DownloadFailed, check_published, find_record, patiently
from k3ray.download.selection import CONFIG, TOKENIZER, ShardMap, all_shards, index_names, map_shards, small_files
from k3ray.download.stream import Line, new_client
from k3ray.download.workplace import Workplace, occupied, telling_disk
from k3ray.workers.checkpoint.index_file import read_index_file
from k3ray.workers.counted import counted

Say = Callable[[str], None]
Look = Callable[[Reached], None]


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user asks for. repository, revision None: those the folder has already, else the pinned release.

    layers: zero-based, None: all. deep: prove files again that are finished and unchanged since.
    """

    directory: Path
    repository: str | None = None
    revision: str | None = None
    tokenizer_only: bool = False
    layers: range | None = None
    workers: int = 4
    deep: bool = False


@dataclass(frozen=True, slots=True)
class Summary:
    """What a download did. kept_files: those that were finished and unchanged, and so not read.

    layers: complete ones in the folder now; None where no layers were asked for.
    """

    directory: str
    repository: str
    commit: str
    num_files: int
    num_bytes: int
    kept_files: int
    fetched_bytes: int
    transferred_again_bytes: int
    seconds: float
    layers: list[int] | None
    top_complete: bool | None


def download(wish: Wish, hub: Hub, patience: Patience, say: Say, look: Look) -> Summary:
    """Make the wish true in the folder. Raises HubRefused, RecordError, NoSpace, DownloadBusy, DownloadFailed, ..."""
    with _at_work(wish.directory, wish.workers, hub, patience) as (workplace, line):
        own = TOKENIZER if wish.tokenizer_only else (CONFIG,)
        with telling_disk(workplace.directory, FOLDER):
            record = find_record(wish.repository, wish.revision, own, workplace, line, patience, say)
            return _Work(wish, workplace, line, patience, record, say, look).run()


def fetch_again(
    directory: Path, names: Iterable[str], hub: Hub, listing: Listing, patience: Patience, say: Say, look: Look
) -> int:
    """Prove these files against the listing and fetch what is wrong of them; returns the bytes that arrived."""
    with _at_work(directory, 4, hub, patience) as (workplace, line):
        record = read_record(workplace.directory) or replace(new_record(listing), wanted=frozenset(listing.names))
        work = _Work(Wish(directory, listing.repository), workplace, line, patience, record, say, look)
        with telling_disk(workplace.directory, FOLDER):
            work.fetch(sorted(names), prove=True)
        return work.counts.reached().fetched


@contextmanager
def _at_work(directory: Path, workers: int, hub: Hub, patience: Patience) -> Iterator[tuple[Workplace, Line]]:
    """The folder held alone and the connections; a request to end this process unwinds, as Ctrl-C does."""
    with (
        unwinding_signals(),
        occupied(directory, "DIR") as workplace,
        new_client(patience.stall_s, workers) as client,
    ):
        yield workplace, Line(hub, client, patience.stall_s)


class _Work:
    """One download at work."""

    def __init__(
        self, wish: Wish, workplace: Workplace, line: Line, patience: Patience, record: Record, say: Say, look: Look
    ) -> None:
        self.counts = Counts()
        self._wish = wish
        self._workplace = workplace
        self._line = line
        self._patience = patience
        self._notes = Notes(workplace, record)
        self._say = say
        self._look = look
        self._kept = 0

    @property
    def _record(self) -> Record:
        return self._notes.record

    def run(self) -> Summary:
        """Fetch the small files, then the shards."""
        start = time.monotonic()
        write_record(self._workplace.directory, self._record)
        small = small_files(self._listing(), self._wish.tokenizer_only)
        self._want(self._record.wanted.union(small))
        self.fetch(small)
        shard_map, shards = None, frozenset[str]()
        if not self._wish.tokenizer_only:
            shard_map, shards = self._choose_shards()
            self.fetch(sorted(shards))
        reached = self.counts.reached()
        wanted = [self._record.files[name] for name in (*small, *shards)]
        here = frozenset(name for name in self._record.finished if self._workplace.final(name).is_file())
        asked = self._wish.layers is not None and shard_map is not None
        return Summary(
            directory=str(self._wish.directory),
            repository=self._record.repository,
            commit=self._record.commit,
            num_files=len(wanted),
            num_bytes=sum(file.size for file in wanted),
            kept_files=self._kept,
            fetched_bytes=reached.fetched,
            transferred_again_bytes=reached.again,
            seconds=time.monotonic() - start,
            layers=shard_map.complete_layers(here) if asked and shard_map else None,
            top_complete=shard_map.top <= here if asked and shard_map else None,
        )

    def fetch(self, names: list[str], prove: bool = False) -> None:
        """Fetch what is missing of these files; raises DownloadFailed with every file that failed.

        prove: read files that are finished and unchanged too.
        """
        self._complete_metadata(names)
        directory = self._workplace.directory
        again = prove or self._wish.deep
        files = [self._record.files[n] for n in names if again or not self._record.is_finished(directory, n)]
        self._kept += len(names) - len(files)
        self._workplace.check_space(files)
        setting = Setting(
            self._workplace, self._listing(), self._line, self._patience, self.counts, self._notes, self._say
        )
        jobs = [FileJob(setting, file) for file in files]
        for job in jobs:
            job.expect()
        if failures := self._run_jobs(jobs, setting):
            listed = "".join(f"\n  {failure}" for failure in failures[:20])
            raise DownloadFailed(f"{len(failures)} of {counted(len(names), 'file')} could not be fetched:{listed}")

    def _run_jobs(self, jobs: list[FileJob], setting: Setting) -> list[FetchFailed]:
        """Run the jobs; those given up because the line broke once more, as long as other files get through."""
        lost: list[FetchFailed] = []
        while jobs:
            done, workers = self.counts.reached().files_done, min(self._wish.workers, len(jobs))
            failures = run_jobs(jobs, workers, self._line, self._patience.grace_s, self._tell)
            again = [failure for failure in failures if failure.may_pass]
            if again and self.counts.reached().files_done == done:
                return lost + failures
            lost += [failure for failure in failures if not failure.may_pass]
            jobs = [FileJob(setting, self._record.files[failure.name]) for failure in again]
            if again:
                self._say(f"given up and now tried once more: {', '.join(failure.name for failure in again)}")
        return lost

    def _tell(self) -> None:
        self._look(self.counts.reached())

    def _listing(self) -> Listing:
        return self._record.listing

    def _complete_metadata(self, names: list[str]) -> None:
        """Ask for the size and checksum of each file that the listing left out."""
        found: dict[str, HubFile] = {}
        for name in names:
            if name not in self._record.files:
                question = partial(self._line.hub.file, self._listing(), name)
                found[name] = patiently(self._line, self._patience, self._say, question)
        if found:
            check_published(self._record.repository, self._record.commit, found, self._line.hub)
            self._notes.record = replace(self._record, files={**self._record.files, **found})

    def _choose_shards(self) -> tuple[ShardMap | None, frozenset[str]]:
        """The shards that are wanted, by the index file that was fetched."""
        names = index_names(self._listing())
        shard_map = map_shards(read_index_file(self._workplace.final(names[0]))) if names else None
        shards = all_shards(self._listing(), shard_map)
        if self._wish.layers is not None:
            if shard_map is None:
                raise HubRefused("--layers: the repository has no index file that says where layers are; leave it out")
            shards = shard_map.holding(self._wish.layers)
        here = (name for name in self._record.wanted if self._workplace.final(name).is_file())
        self._want(shards.union(here))  # not what an earlier command asked for and did not get
        return shard_map, shards

    def _want(self, names: frozenset[str]) -> None:
        """Note what is wanted, so that a proof knows what a part of the model leaves out."""
        self._notes.record = replace(self._record, wanted=names)
        write_record(self._workplace.directory, self._notes.record)
