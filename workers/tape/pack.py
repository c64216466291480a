"""Packing: the trunk's matrices, read from the shards in execution order and written as one tape, in bounded memory.

Everything is written to a folder beside the wanted one, which is renamed when it is whole; what an interrupted pack
left there is taken up again.
"""

from __future__ import annotations

import os
import queue
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from k3ray.workers.checkpoint.binding import Binding
from k3ray.workers.checkpoint.tensors import TensorReader
from k3ray.workers.failure import Failure
from k3ray.workers.tape.chunk_reader import read_from_shards
from k3ray.workers.tape.chunk_writer import ChunkWriter
from k3ray.workers.tape.direct_io import Bytes, DirectFile, DiskReadFailure, prefaulted
from k3ray.workers.tape.identity import sample_all
from k3ray.workers.tape.journal import JOURNAL_NAME, Journal
from k3ray.workers.tape.layout import DEFAULT_CHUNK_BYTES, TapeLayout, plan_layout
from k3ray.workers.tape.manifest import TAPE_NAME, make_identity, write_manifest

DEFAULT_THREADS = 3  # one reads, one writes, one computes a checksum
JOURNAL_EVERY_BYTES = 256 << 20  # what a kill may cost
SPARE_BYTES = 1 << 20  # manifest, journal, and the folder itself


class PackFailure(Failure):
    """A tape that cannot be made there as asked."""

    exit_code = 2


class PackInterrupted(Failure):
    """A pack that stopped half way; what is done is kept for the next one."""


@dataclass(frozen=True, slots=True)
class PackSummary:
    """A finished tape. kept_bytes: of it, found whole from an earlier, interrupted pack."""

    folder: Path
    tape_bytes: int
    padding_bytes: int
    kept_bytes: int
    num_chunks: int
    seconds: float


def partial_folder(out: Path) -> Path:
    """Where a tape is kept until it is whole."""
    return out.with_name(f"{out.name}.partial")


def pack(
    binding: Binding,
    reader: TensorReader,
    out: Path,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    threads: int = DEFAULT_THREADS,
    progress: Callable[[int, int], None] = lambda done, total: None,
    say: Callable[[str], None] = lambda line: None,
) -> PackSummary:
    """Write the tape of a bound checkpoint to the folder `out`, which must not exist or be empty.

    `progress` is told (bytes done, bytes in all). Raises PackFailure or JournalFailure before anything is written,
    PackInterrupted when the disk fails or fills up, TensorReadError when the shards cannot be read.
    """
    started = time.monotonic()
    out = out.absolute()
    folder = partial_folder(out)
    layout = plan_layout(binding.config, chunk_bytes)
    _refuse_existing(out)
    _refuse_full_disk(folder, layout)
    samples = sample_all(binding, reader, layout)
    identity = make_identity(binding.config, layout, reader.index.directory.name, reader.index.fingerprint, samples)
    with _failures_explained(folder):
        folder.mkdir(exist_ok=True)
        path = folder / TAPE_NAME
        with Journal(folder, identity) as journal, ChunkWriter(path, say) as writer:
            packing = _Packing(binding, reader, layout, writer, journal, path)
            checksums = packing.run(threads, progress)
            write_manifest(folder, identity, checksums)
            folder.rename(out)
            _sync_folder(out.parent)
            (out / JOURNAL_NAME).unlink(missing_ok=True)
    seconds = time.monotonic() - started
    return PackSummary(out, layout.total_bytes, layout.padding_bytes, packing.kept_bytes, len(layout.chunks), seconds)


class _Packing:
    """One run over all chunks: threads fill, check and write them; the caller's thread keeps the journal."""

    def __init__(
        self,
        binding: Binding,
        reader: TensorReader,
        layout: TapeLayout,
        writer: ChunkWriter,
        journal: Journal,
        path: Path,
    ) -> None:
        self._binding = binding
        self._reader = reader
        self._layout = layout
        self._writer = writer
        self._journal = journal
        self._kept = DirectFile(path) if journal.finished else None
        self._numbers = iter(range(len(layout.chunks)))
        self._answers: queue.SimpleQueue[tuple[int, int, bool] | BaseException] = queue.SimpleQueue()
        self._stop = False
        self.kept_bytes = 0

    def run(self, threads: int, progress: Callable[[int, int], None]) -> list[int]:
        """Do every chunk and return the checksums; what is done by the time of an error is in the journal."""
        workers = [threading.Thread(target=self._work, name=f"k3ray-pack-{i}", daemon=True) for i in range(threads)]
        for worker in workers:
            worker.start()
        checksums = [0] * len(self._layout.chunks)
        waiting: list[tuple[int, int]] = []  # written, perhaps not yet on the disk
        done = waiting_bytes = 0
        try:
            for _ in checksums:
                answer = self._answers.get()
                if isinstance(answer, BaseException):
                    raise answer
                number, checksums[number], kept = answer
                nbytes = self._layout.chunks[number].nbytes
                done += nbytes
                if kept:
                    self.kept_bytes += nbytes
                else:
                    waiting.append((number, checksums[number]))
                    waiting_bytes += nbytes
                progress(done, self._layout.total_bytes)
                if waiting_bytes >= JOURNAL_EVERY_BYTES:
                    self._note(waiting)
                    waiting_bytes = 0
        finally:
            self._stop = True
            for worker in workers:
                worker.join()
            if self._kept is not None:
                self._kept.close()
            self._note(waiting)
        return checksums

    def _note(self, waiting: list[tuple[int, int]]) -> None:
        self._writer.sync()
        self._journal.append(waiting)
        waiting.clear()

    def _work(self) -> None:
        """Do chunks until there are none, or one has failed in any thread."""
        try:
            slot = prefaulted(self._layout.chunk_bytes)
            for number in self._numbers:
                if self._stop:
                    return
                checksum = self._kept_checksum(number, slot)
                kept = checksum is not None
                if checksum is None:
                    data = read_from_shards(self._binding, self._reader, self._layout, number, slot)
                    checksum = zlib.crc32(data.data)
                    self._writer.write(data, self._layout.chunks[number].offset)
                self._answers.put((number, checksum, kept))
        except BaseException as error:  # noqa: BLE001 - raised by run, in the caller's thread
            self._stop = True
            self._answers.put(error)

    def _kept_checksum(self, number: int, slot: Bytes) -> int | None:
        """The checksum of a chunk that an earlier pack wrote, None unless it is still there as it was."""
        noted = self._journal.finished.get(number)
        if noted is None or self._kept is None:
            return None
        chunk = self._layout.chunks[number]
        try:
            data = self._kept.read(slot, chunk.offset, chunk.nbytes)
        except DiskReadFailure:  # cut, or on a bad sector that writing it again may replace
            return None
        return noted if zlib.crc32(data.data) == noted else None


@contextmanager
def _failures_explained(folder: Path) -> Iterator[None]:
    """Turn what the system says while the tape is written into PackInterrupted."""
    try:
        yield
    except OSError as error:
        raise PackInterrupted(
            f"{folder}: the tape could not be written ({error.strerror}); what was done is kept there: make room or "
            "look at the disk, then run the same command again"
        ) from error


def _refuse_existing(out: Path) -> None:
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists() or out.is_symlink():
        raise PackFailure(f"{out}: exists already and is no tape of this model; name a new folder")
    if not out.parent.is_dir():
        raise PackFailure(f"{out}: the folder {out.parent} does not exist; make it first")


def _refuse_full_disk(folder: Path, layout: TapeLayout) -> None:
    try:
        already = (folder / TAPE_NAME).stat().st_blocks * 512
    except OSError:
        already = 0
    needed = max(layout.total_bytes - already, 0) + SPARE_BYTES
    free = shutil.disk_usage(folder.parent).free
    if free < needed:
        raise PackFailure(
            f"{folder.parent}: {free / 1e9:,.3f} GB free, the tape needs {needed / 1e9:,.3f} GB more; make room or "
            "name another disk; nothing was written"
        )


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
