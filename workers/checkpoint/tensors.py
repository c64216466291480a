"""Reads tensors' bytes from the shards into memory of ours: aligned, writable, complete or not at all.

Nothing is widened: bf16 is given as its bits. Usable from threads: positions are given with every read, and each shard
is opened once.
"""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from k3ray.workers.checkpoint.header_json import show_name
from k3ray.workers.checkpoint.index_table import TensorEntry, TensorIndex
from k3ray.workers.failure import Failure

PAGE_BYTES = 4096
MAX_READ_BYTES = 1 << 30  # Linux returns at most 0x7ffff000 bytes for one read
NAN_SCALE = 255
ARRAY_DTYPES: dict[str, type[np.generic]] = {
    "BF16": np.uint16,  # its bits
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "BOOL": np.bool_,
    "U8": np.uint8,
    "U16": np.uint16,
    "U32": np.uint32,
    "U64": np.uint64,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
}

Array = npt.NDArray[Any]


class TensorReadError(Failure):
    """A tensor's bytes cannot be read as they were indexed: names the file and the place."""

    def __init__(self, path: Path, name: str, found: str, expected: str) -> None:
        self.path = path
        self.tensor = name
        super().__init__(f"{path}: tensor {show_name(name)}: found {found}, expected {expected}")


def aligned_empty(nbytes: int) -> npt.NDArray[np.uint8]:
    """(nbytes,) u8 of own memory that begins on a page."""
    memory = np.empty(nbytes + PAGE_BYTES, dtype=np.uint8)
    skip = -memory.ctypes.data % PAGE_BYTES
    return memory[skip : skip + nbytes]


def count_nan_scales(scales: npt.NDArray[np.uint8]) -> int:
    """How many E8M0 scale bytes are 255, the format's NaN."""
    return int(np.count_nonzero(scales == NAN_SCALE))


def require_finite(entry: TensorEntry, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The values of a tensor as they are, (entries,) f32; TensorReadError where one is NaN or infinite."""
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        found = f"{values[bad[0]]} at entry {bad[0]}"
        raise TensorReadError(
            entry.path, entry.name, found, "finite values: the shard is damaged, run `k3ray verify` and fetch it again"
        )
    return values


def _close_all(files: dict[Path, int]) -> None:
    """Close descriptors, once."""
    while files:
        os.close(files.popitem()[1])


class TensorReader:
    """Reads by name from the shards of one index, or of several that hold a checkpoint together; keeps the files open.

    A tensor that is in several is read from the first of them.
    """

    def __init__(self, index: TensorIndex, *others: TensorIndex) -> None:
        self.index = index
        self._indices = (index, *others)
        self._files: dict[Path, int] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._files)  # whoever forgets the reader must not keep its files open
        self._shards = {one.directory / shard.name: shard for one in self._indices for shard in one.shards}

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the shards; a later read opens them again."""
        with self._lock:
            _close_all(self._files)

    def read(self, name: str, out: Array | None = None) -> Array:
        """The whole tensor in its shape, in `out` when given (same dtype and size, C-contiguous), else in new memory.

        BF16 is uint16 bits, F32 float32, U8 uint8. Raises TensorReadError.
        """
        entry = self.entry(name)
        return self._read(entry, entry.offset, entry.shape, out)

    def read_row(self, name: str, row: int, out: Array | None = None) -> Array:
        """One row of a matrix: (columns,), or (1,) of a vector."""
        return self.read_rows(name, row, row + 1, out).reshape(-1)

    def read_rows(self, name: str, low: int, high: int, out: Array | None = None) -> Array:
        """The rows low..high of a tensor with at least one axis: (high - low, ...). Raises TensorReadError."""
        entry = self.entry(name)
        rows = entry.shape[0] if entry.shape else 0
        if not 0 <= low <= high <= rows:
            raise TensorReadError(entry.path, name, f"a read of rows {low}..{high}", f"rows within 0..{rows}")
        row_bytes = entry.nbytes // rows if rows else 0
        return self._read(entry, entry.offset + low * row_bytes, (high - low, *entry.shape[1:]), out)

    def entry(self, name: str) -> TensorEntry:
        """Where a tensor lies; raises TensorReadError when the checkpoint has none of that name."""
        for index in self._indices:
            entry = index.find(name)
            if entry is not None:
                return entry
        raise TensorReadError(self.index.directory, name, "no such tensor", f"one of its {len(self.index)} tensors")

    def _read(self, entry: TensorEntry, offset: int, shape: tuple[int, ...], out: Array | None) -> Array:
        dtype = ARRAY_DTYPES.get(entry.dtype)
        if dtype is None:
            raise TensorReadError(entry.path, entry.name, f"dtype {entry.dtype}", f"one of {', '.join(ARRAY_DTYPES)}")
        if out is None:
            nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
            out = aligned_empty(nbytes).view(dtype)
        fits = out.dtype == dtype and out.size == np.prod(shape, dtype=np.int64)
        if not fits or not out.flags.c_contiguous or not out.flags.writeable:
            raise ValueError(f"out must be writable C-contiguous {dtype.__name__} {shape}, is {out.dtype} {out.shape}")
        flat = out.reshape(-1)
        self._fill(entry, offset, flat.view(np.uint8))
        return flat.reshape(shape)

    def _fill(self, entry: TensorEntry, offset: int, target: npt.NDArray[np.uint8]) -> None:
        """Fill `target` from the shard; a read may return less than asked, and nothing only at the file's end."""
        descriptor = self._open(entry)
        view = target.data
        done = 0
        while done < target.nbytes:
            try:
                count = os.preadv(descriptor, [view[done : done + MAX_READ_BYTES]], offset + done)
            except OSError as error:
                found = f"a read that failed at byte {offset + done} ({error.strerror})"
                raise TensorReadError(
                    entry.path, entry.name, found, f"{target.nbytes} bytes from byte {offset}"
                ) from error
            if count == 0:
                found = f"the file's end at byte {offset + done}"
                expected = (
                    f"{target.nbytes} bytes from byte {offset}: the file was cut after it was indexed, fetch it again"
                )
                raise TensorReadError(entry.path, entry.name, found, expected)
            done += count

    def _open(self, entry: TensorEntry) -> int:
        """The shard's descriptor, the same file as indexed."""
        with self._lock:
            if (descriptor := self._files.get(entry.path)) is not None:
                return descriptor
            try:
                descriptor = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                found = f"a shard that cannot be opened ({error.strerror})"
                raise TensorReadError(entry.path, entry.name, found, "the shard that was indexed") from error
            found_stat = os.fstat(descriptor)
            shard = self._shards[entry.path]
            if (found_stat.st_size, found_stat.st_mtime_ns) != (shard.file_bytes, shard.mtime_ns):
                os.close(descriptor)
                found = f"a file of {found_stat.st_size} bytes changed after it was indexed"
                raise TensorReadError(entry.path, entry.name, found, f"the indexed one of {shard.file_bytes} bytes")
            self._files[entry.path] = descriptor
            return descriptor
