"""The tape's speeds: packing against copying the same bytes, and the ring against plain direct reads of the disk.

Runs are interleaved and medians are printed, so that a busy machine is unfair to all alike. Makes a checkpoint of the
released widths (two layers, 3.8 GB) unless one is named; needs about three times its size on the disk:
    .venv/bin/python benchmarks/pack.py --folder /tmp/tape-benchmark --repeats 5
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from k3ray.workers.checkpoint.binding import bind
from k3ray.workers.checkpoint.index import open_index
from k3ray.workers.checkpoint.synthetic import write_checkpoint
from k3ray.workers.checkpoint.synthetic_spec import released_spec
from k3ray.workers.checkpoint.tensors import TensorReader
from k3ray.workers.model.config import read_config
from k3ray.workers.tape.direct_io import DirectFile, prefaulted
from k3ray.workers.tape.pack import pack
from k3ray.workers.tape.residency import fixed_residency
from k3ray.workers.tape.stage_chunks import StageChunks
from k3ray.workers.tape.tape import Tape, open_tape

COPY_BLOCK = 8 << 20


def make_model(folder: Path) -> Path:
    """The released widths with few layers and experts: a tape of 3.5 GB."""
    spec = replace(released_spec(2, 2), num_experts_per_token=2, vocab_size=20_480)
    write_checkpoint(folder, spec, 0)
    return folder


def forget(model: Path) -> None:
    """Push the shards out of the page cache."""
    for path in model.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def copy_bytes(model: Path, target: Path, nbytes: int, flush: bool) -> None:
    """Copy so many bytes of the shards to one file, block by block through the page cache, as a plain copy does."""
    block = memoryview(bytearray(COPY_BLOCK))
    with target.open("wb", buffering=0) as out:
        for path in sorted(model.glob("*.safetensors")):
            with path.open("rb", buffering=0) as shard:
                while nbytes and (count := shard.readinto(block[: min(nbytes, COPY_BLOCK)])):
                    out.write(block[:count])
                    nbytes -= count
        if flush:
            os.fsync(out.fileno())
    target.unlink()


def timed(action: Callable[[], object]) -> float:
    """Seconds of the wall clock."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def compare_packing(model: Path, folder: Path, repeats: int, threads: list[int]) -> None:
    """Pack and copy in turn; a tape is on the disk when packing ends, so is a flushed copy."""
    index = open_index(model)
    binding = bind(read_config(model), index)
    seconds: dict[str, list[float]] = defaultdict(list)
    nbytes = 0
    for _ in range(repeats):
        for cache in ("cold", "warm"):
            for count in threads:
                if cache == "cold":
                    forget(model)
                with TensorReader(index) as reader:
                    summary = pack(binding, reader, folder / "packed", threads=count)
                nbytes = summary.tape_bytes
                shutil.rmtree(folder / "packed")
                seconds[f"{cache} pack, {count} threads"].append(summary.seconds)
            for flush in (True, False):
                if cache == "cold":
                    forget(model)
                name = f"{cache} copy, {'on the disk' if flush else 'perhaps still in memory'}"
                seconds[name].append(timed(partial(copy_bytes, model, folder / "copy", nbytes, flush)))
    report(seconds, nbytes)


def read_plainly(path: Path, nbytes: int, chunk_bytes: int, depth: int) -> None:
    """Read a file with so many direct reads under way."""
    offsets = iter(range(0, nbytes, chunk_bytes))
    with DirectFile(path) as file:

        def work() -> None:
            slot = prefaulted(chunk_bytes)
            for offset in offsets:
                file.read(slot, offset, min(chunk_bytes, nbytes - offset))

        threads = [threading.Thread(target=work) for _ in range(depth)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def read_through_ring(tape: Tape, ring_chunks: int, readers: int, turns: int) -> list[float]:
    """Stream the whole tape; the first turn proves every checksum. Seconds of each turn."""
    residency = fixed_residency(tape.layout, range(len(tape.layout.chunks)), 0, ring_chunks)
    chunks = StageChunks(tape, residency, readers)

    def turn() -> None:
        for place in range(len(residency.chunks)):
            chunks.take(place)
            chunks.release(place)

    seconds = [timed(turn) for _ in range(turns)]
    chunks.close()
    return seconds


def compare_reading(model: Path, folder: Path, repeats: int, chunk_sizes: list[int]) -> None:
    """Read the tape plainly and through the ring in turn."""
    index = open_index(model)
    binding = bind(read_config(model), index)
    seconds: dict[str, list[float]] = defaultdict(list)
    for chunk_bytes in chunk_sizes:
        with TensorReader(index) as reader:
            pack(binding, reader, folder / "packed", chunk_bytes)
            tape = open_tape(folder / "packed", binding, reader, [])
        nbytes, name = tape.layout.total_bytes, f"{chunk_bytes >> 20} MiB"
        for _ in range(repeats):
            for depth in (1, 4, 16):
                run = timed(partial(read_plainly, tape.file.path, nbytes, chunk_bytes, depth))
                seconds[f"{name} plain, depth {depth}"].append(run)
            for ring_chunks, readers in ((2, 1), (4, 2), (8, 4), (32, 16)):
                first, *others = read_through_ring(tape, ring_chunks, readers, 2)
                seconds[f"{name} ring of {ring_chunks}, {readers} readers, first turn"].append(first)
                seconds[f"{name} ring of {ring_chunks}, {readers} readers, later turns"] += others
        tape.file.close()
        shutil.rmtree(folder / "packed")
    report(seconds, nbytes)
    block = prefaulted(64 << 20)
    report({"CRC-32 of bytes in memory": [timed(lambda: zlib.crc32(block.data)) for _ in range(5)]}, block.nbytes)


def report(seconds: dict[str, list[float]], nbytes: int) -> None:
    """Print medians and spreads."""
    for name, runs in seconds.items():
        median = statistics.median(runs)
        print(
            f"{name:48s} {nbytes / 1e9 / median:6.2f} GB/s   median {median:7.3f} s of {len(runs)} "
            f"({min(runs):.3f}..{max(runs):.3f})",
            flush=True,
        )


def main() -> None:
    """Run both comparisons."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=None, help="a checkpoint; made when none is named")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to be measured")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 3], help="of packing")
    parser.add_argument("--chunk-mib", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--only", choices=("packing", "reading"), default=None)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tape-benchmark-", dir=arguments.folder))
    try:
        model = arguments.model or make_model(folder / "model")
        if arguments.only != "reading":
            compare_packing(model, folder, arguments.repeats, arguments.threads)
        if arguments.only != "packing":
            compare_reading(model, folder, arguments.repeats, [count << 20 for count in arguments.chunk_mib])
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
