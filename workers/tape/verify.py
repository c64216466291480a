"""Proves a tape against the shards it was packed from, bit by bit, padding and checksums included."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from k3ray.workers.checkpoint.binding import Binding
from k3ray.workers.checkpoint.tensors import TensorReader
from k3ray.workers.tape.chunk_reader import read_from_shards
from k3ray.workers.tape.direct_io import Bytes, prefaulted
from k3ray.workers.tape.layout import TapeLayout
from k3ray.workers.tape.manifest import TAPE_NAME, TapeError
from k3ray.workers.tape.order import full_name
from k3ray.workers.tape.tape import Tape

DEFAULT_THREADS = 3


@dataclass(frozen=True, slots=True)
class VerifySummary:
    """A tape that is the shards' to the last bit."""

    tape_bytes: int
    num_tensors: int
    seconds: float


def verify(
    tape: Tape,
    binding: Binding,
    reader: TensorReader,
    threads: int = DEFAULT_THREADS,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> VerifySummary:
    """Compare every byte; raises TapeError at the first difference, naming the tensor, its row and the place."""
    started = time.monotonic()
    layout, slots = tape.layout, threading.local()

    def check(number: int) -> int:
        if not hasattr(slots, "pair"):
            slots.pair = prefaulted(layout.chunk_bytes), prefaulted(layout.chunk_bytes)
        ours, theirs = slots.pair
        found = tape.read(number, ours, check=False)
        expected = read_from_shards(binding, reader, layout, number, theirs)
        if not np.array_equal(found.view(np.uint64), expected.view(np.uint64)):
            raise _difference(tape, binding, number, found, expected)
        if (checksum := zlib.crc32(found.data)) != tape.checksums[number]:
            raise TapeError(
                tape.folder,
                f"checksum {tape.checksums[number]:08x} of chunk {number} in the manifest",
                f"{checksum:08x}, that of the tape's and the shards' bytes",
            )
        return found.nbytes

    done = 0
    executor = ThreadPoolExecutor(threads, thread_name_prefix="k3ray-verify")
    try:
        for nbytes in executor.map(check, range(len(layout.chunks))):
            done += nbytes
            progress(done, layout.total_bytes)
    finally:
        executor.shutdown(cancel_futures=True)
    return VerifySummary(done, len(layout.tensors), time.monotonic() - started)


def _difference(tape: Tape, binding: Binding, number: int, found: Bytes, expected: Bytes) -> TapeError:
    """The error for the first byte of a chunk that differs."""
    chunk = tape.layout.chunks[number]
    byte = int(np.flatnonzero(found != expected)[0])
    where = _describe(tape.layout, binding, number, byte)
    return TapeError(
        tape.folder / TAPE_NAME,
        f"{found[byte]:#04x} at byte {chunk.offset + byte} ({where})",
        f"{expected[byte]:#04x} as in the shards",
        "the tape is damaged or of other weights: remove it and pack the model again",
    )


def _describe(layout: TapeLayout, binding: Binding, number: int, byte: int) -> str:
    for segment in layout.chunks[number].segments:
        tensor = layout.tensors[segment.tensor]
        row = (byte - segment.offset) // tensor.row_bytes
        if 0 <= row < segment.rows:
            return f"{full_name(binding, tensor)}, row {segment.first_row + row}"
    return "padding"
