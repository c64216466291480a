"""How fast this machine's disk and memory are when they are used as the engine uses them.

Short and bounded: a few seconds, nothing kept. Another program's work shows in the figures; the best of several passes
over memory is taken, and the mean of everything read from the disk.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from k3ray.kernels import dense, mxfp4
from k3ray.kernels.threads import RowPool
from k3ray.workers.failure import Failure
from k3ray.workers.half_written import beside, remove_abandoned
from k3ray.workers.tape.direct_io import PAGE_BYTES, Bytes, DirectFile, prefaulted, slot_bytes
from k3ray.workers.tape.layout import DEFAULT_CHUNK_BYTES

CHUNK, EXPERT = "tape chunk", "expert"
PIECES = {CHUNK: DEFAULT_CHUNK_BYTES, EXPERT: 17_547_264}  # of the released model
DEPTHS = (1, 16)
SECONDS = 2.0  # of each of the four figures
LARGEST_BYTES = 8 << 30  # read for each of them
FEWEST_PIECES = 4  # of a file, or its figure says nothing
MOST_FILES = 16
TEST_FILE_BYTES = 2 << 30
TEST_FILE_PREFIX = ".k3ray-devbw-"
MEMORY_BYTES = 256 << 20
PASSES = 5


class DeviceFailure(Failure):
    """Nothing that could be measured."""


class NothingToMeasure(DeviceFailure):
    """A path that is not there."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """Random reads of one size, `depth` at a time. direct: past the page cache; else the figure may be the cache's."""

    kind: str
    piece_bytes: int
    depth: int
    direct: bool
    bytes_read: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        """Bytes a second."""
        return self.bytes_read / self.seconds


@dataclass(frozen=True, slots=True)
class MemorySpeed:
    """Bytes of weights a second, all threads together. read: numpy's largest word, so no less than what is there.

    trunk, experts: the engine's own kernels on one token, bf16 rows and MXFP4 rows of the released width.
    """

    threads: int
    read_bytes_per_s: float
    trunk_bytes_per_s: float
    expert_bytes_per_s: float


def device_name(path: Path) -> str:
    """Return the name of the block device that holds a path, or its numbers where the system has no name for it."""
    device = path.stat().st_dev
    numbers = f"{os.major(device)}:{os.minor(device)}"
    place = Path("/sys/dev/block") / numbers
    return place.resolve().name if place.exists() else numbers


def measurable_files(path: Path, piece_bytes: int | None = None) -> list[Path]:
    """The file itself, or the largest files of a folder that are long enough to say something, largest first.

    piece_bytes: what is read at once, unless it is a piece of the released model. Raises DeviceFailure when there is
    none.
    """
    if path.is_file():
        candidates = [path]
    elif path.is_dir():
        candidates = [entry for entry in path.iterdir() if entry.is_file()]
    else:
        raise NothingToMeasure(f"{path}: there is no such file or folder; name one that the engine would read")
    sized = sorted(((candidate.stat().st_size, candidate) for candidate in candidates), reverse=True)
    enough = FEWEST_PIECES * (piece_bytes or max(PIECES.values()))
    found = [candidate for nbytes, candidate in sized[:MOST_FILES] if nbytes >= enough]
    if not found:
        largest = f"the largest has {sized[0][0]:,} bytes" if sized else "there is none"
        raise DeviceFailure(
            f"{path}: found no file of at least {enough:,} bytes ({largest}); name a larger one, or a folder with "
            f"--write, which makes a file of {TEST_FILE_BYTES >> 30} GiB there and removes it afterwards"
        )
    return found


def measure_disk(
    paths: Sequence[Path],
    seconds: float = SECONDS,
    say: Callable[[str], None] = lambda line: None,
    kinds: Sequence[str] = (CHUNK, EXPERT),
    depths: Sequence[int] = DEPTHS,
    pieces: Mapping[str, int] | None = None,
) -> list[DiskSpeed]:
    """Read random pieces of the files, no piece twice for one figure, as long as `seconds` for each kind and depth.

    pieces: bytes by kind, those of the released model unless given. Raises DiskReadFailure; `say` is told when the file
    system refuses O_DIRECT.
    """
    pieces = pieces or PIECES
    with ExitStack() as opened:
        files = [opened.enter_context(DirectFile(path, say)) for path in paths]
        slots = [prefaulted(slot_bytes(max(pieces[kind] for kind in kinds))) for _ in range(max(depths))]
        return [_read_for(files, kind, pieces[kind], slots[:depth], seconds) for kind in kinds for depth in depths]


def _read_for(files: Sequence[DirectFile], kind: str, nbytes: int, slots: Sequence[Bytes], seconds: float) -> DiskSpeed:
    """One figure: a thread for each slot, which claims the next place and reads it."""
    places = iter(_places(files, nbytes, on_pages=kind == CHUNK))
    claiming, counted = threading.Lock(), [0] * len(slots)
    started = time.perf_counter()
    deadline = started + seconds

    def work(number: int) -> None:
        while time.perf_counter() < deadline:
            with claiming:
                place = next(places, None)
            if place is None:
                return
            file, offset = place
            file.read(slots[number], offset, nbytes)
            counted[number] += nbytes

    with ThreadPoolExecutor(len(slots), thread_name_prefix="k3ray-devbw") as threads:
        for _ in threads.map(work, range(len(slots))):
            pass
    elapsed = time.perf_counter() - started
    return DiskSpeed(kind, nbytes, len(slots), all(file.direct for file in files), sum(counted), elapsed)


def measure_bursts(
    paths: Sequence[Path], piece_bytes: int, depth: int, burst: int, seconds: float = SECONDS
) -> DiskSpeed:
    """Read random pieces as a layer asks for its experts: so many at once, by `depth` threads, and none before all
    are there. No piece is read twice. Raises DiskReadFailure.
    """
    with ExitStack() as opened, ThreadPoolExecutor(depth, thread_name_prefix="k3ray-devbw") as threads:
        files = [opened.enter_context(DirectFile(path)) for path in paths]
        slots = [prefaulted(slot_bytes(piece_bytes)) for _ in range(burst)]
        places = iter(_places(files, piece_bytes, on_pages=False))
        started, counted = time.perf_counter(), 0
        while time.perf_counter() < started + seconds:
            taken = list(islice(places, burst))
            if not taken:
                break
            reads = [threads.submit(file.read, slot, offset, piece_bytes)
                     for (file, offset), slot in zip(taken, slots, strict=False)]  # fmt: skip
            counted += sum(read.result().nbytes for read in reads)
        elapsed = time.perf_counter() - started
        return DiskSpeed(EXPERT, piece_bytes, depth, all(file.direct for file in files), counted, elapsed)


def _places(files: Sequence[DirectFile], nbytes: int, on_pages: bool) -> list[tuple[DirectFile, int]]:
    """Disjoint pieces of the files in random order; a tensor of a checkpoint begins anywhere, a chunk on a page."""
    shift = 0 if on_pages else PAGE_BYTES // 2 + 8
    places = [(file, offset + shift)
              for file in files for offset in range(0, file.file_bytes - nbytes - shift + 1, nbytes)]  # fmt: skip
    random.Random(0).shuffle(places)
    return places[: max(1, LARGEST_BYTES // nbytes)]


@contextmanager
def written_file(
    folder: Path, nbytes: int = TEST_FILE_BYTES, progress: Callable[[int, int], None] = lambda done, total: None
) -> Iterator[Path]:
    """A file of random bytes in the folder, on the disk when this yields, gone at the end. Raises DeviceFailure."""
    if not folder.is_dir():
        raise NothingToMeasure(f"--write {folder}: expected a folder to write the test file into")
    remove_abandoned(folder, TEST_FILE_PREFIX)
    free_bytes = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    if free_bytes < nbytes + nbytes // 10:
        raise DeviceFailure(f"--write {folder}: found {free_bytes:,} bytes free, expected at least {nbytes:,}")
    block = random.Random(0).randbytes(min(nbytes, 32 << 20))
    try:
        with beside(folder, TEST_FILE_PREFIX) as (file, path):
            for done in range(0, nbytes, len(block)):
                file.write(block[: nbytes - done])
                progress(min(done + len(block), nbytes), nbytes)
            file.flush()
            os.fsync(file.fileno())
            yield path
    except OSError as error:
        raise DeviceFailure(f"--write {folder}: the test file could not be written ({error.strerror})") from None


def measure_memory(threads: int, cores: Sequence[int] = (), nbytes: int = MEMORY_BYTES) -> MemorySpeed:
    """Read `nbytes` of memory in three ways with so many threads; the best pass of each counts."""
    memory = prefaulted(nbytes)
    memory[:] = 0x3C  # ordinary numbers as bf16, as nibbles and as scales
    with RowPool(threads, cores) as pool:
        rates = [_best_rate(work, size) for work, size in _memory_works(memory, pool)]
    return MemorySpeed(threads, *rates)


def _memory_works(memory: Bytes, pool: RowPool) -> Iterator[tuple[Callable[[], object], int]]:
    """(a pass over the memory, the bytes it reads) for the plain read, the trunk's kernel and the experts'."""
    words = memory[: memory.nbytes // (8 * 512) * 8 * 512].view(np.uint64).reshape(-1, 512)

    def largest_word(table: npt.NDArray[np.uint64], low: int, high: int) -> None:
        np.maximum.reduce(table[low:high], axis=None)

    yield lambda: pool.run(largest_word, len(words), words, block_rows=2048), words.nbytes
    columns = 7168
    trunk = memory[: memory.nbytes // (2 * columns) * 2 * columns].view(np.uint16).reshape(-1, columns)
    x = np.ones((1, columns), np.float32)
    yield lambda: dense.matmul(trunk, x, pool), trunk.nbytes
    columns = 3584
    rows = memory.nbytes // (columns // 2 + columns // 32)
    packed = memory[: rows * columns // 2].reshape(rows, -1)
    scales = memory[rows * columns // 2 :][: rows * columns // 32].reshape(rows, -1)
    latent = mxfp4.quantise(np.ones((1, columns), np.float32))
    yield lambda: mxfp4.matmul(packed, scales, latent, pool), packed.nbytes + scales.nbytes


def _best_rate(work: Callable[[], object], nbytes: int) -> float:
    work()  # compiles, and warms up
    seconds = []
    for _ in range(PASSES):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return nbytes / min(seconds)
