"""One shard's safetensors header: read, bounded, and proven against the file's size to the last byte.

Layout: 8-byte little-endian header length, JSON header, tensor bytes without a gap. Docs: CHECKPOINT.md "What a reader
must refuse". Keeps columns, not an object per tensor.
"""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from k3ray.workers.checkpoint.header_json import MAX_INTEGER, Entry, HeaderError, decode_entries, show_name

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMENSIONS = 64
DTYPE_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


@dataclass(frozen=True, slots=True)
class TensorKind:
    """What tensors have in common: dtype, shape, and the bytes they take."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """One shard's tensors as columns in the header's order.

    begins: (tensors,) int64, absolute file offsets. digest: of the header's JSON.
    """

    path: Path
    file_bytes: int
    digest: str
    names: list[str]
    kinds: tuple[TensorKind, ...]
    kind_ids: npt.NDArray[np.uint32]
    begins: npt.NDArray[np.int64]


def read_header(path: Path) -> ShardHeader:
    """Read and prove the header of `path`; raises HeaderError naming the file, the tensor and the numbers."""
    file_bytes, length, text = read_header_bytes(path)
    return parse_header(text, path, file_bytes, LENGTH_BYTES + length)


def header_length(path: Path, prefix: bytes, file_bytes: int) -> int:
    """The length that a shard's first bytes say, checked against the limit and the file; raises HeaderError."""
    if len(prefix) < LENGTH_BYTES:
        raise HeaderError(path, None, f"a file of {file_bytes} bytes", "8 bytes of header length and a header")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise HeaderError(path, None, f"a header length of {length}", f"at most {MAX_HEADER_BYTES} bytes")
    if length > file_bytes - LENGTH_BYTES:
        found = f"a header length of {length} in a file of {file_bytes} bytes"
        raise HeaderError(path, None, found, f"at most {file_bytes - LENGTH_BYTES}")
    return length


def read_header_bytes(path: Path) -> tuple[int, int, bytes]:
    """(file size, header length, header JSON) of a shard, with the length checked against the limit and the file."""
    try:
        with path.open("rb", buffering=0) as file:
            file_bytes = os.fstat(file.fileno()).st_size
            prefix = _read_fully(file.fileno(), LENGTH_BYTES, 0)
            length = header_length(path, prefix, file_bytes)
            text = _read_fully(file.fileno(), length, LENGTH_BYTES)
    except OSError as error:
        raise HeaderError(path, None, f"a file that cannot be read ({error.strerror})", "a readable shard") from error
    if len(text) < length:
        raise HeaderError(path, None, f"{len(text)} bytes of header before the file's end", f"{length}")
    return file_bytes, length, text


def parse_header(text: bytes, path: Path, file_bytes: int, data_start: int) -> ShardHeader:
    """Decode a header's JSON and prove that its tensors fill bytes data_start..file_bytes without gap or overlap."""
    if not text.startswith(b"{"):
        raise HeaderError(path, None, f"a header that begins with {text[:1]!r}", "a JSON object's {")
    names, entries = decode_entries(text, path)
    kinds, kind_ids = _intern_kinds(names, entries, path)
    flat = chain.from_iterable(entry.data_offsets for entry in entries)
    offsets = np.fromiter(flat, dtype=np.int64, count=2 * len(entries)).reshape(-1, 2)
    _check_spans(names, kinds, kind_ids, offsets, path)
    _check_tiling(names, offsets, path, file_bytes - data_start)
    digest = hashlib.blake2b(text, digest_size=16).hexdigest()
    return ShardHeader(path, file_bytes, digest, names, kinds, kind_ids, offsets[:, 0] + data_start)


def _intern_kinds(
    names: list[str], entries: list[Entry], path: Path
) -> tuple[tuple[TensorKind, ...], npt.NDArray[np.uint32]]:
    """The distinct (dtype, shape) of a header, and each tensor's number among them.

    A dtype this reader does not know has no size to check: its span is taken as stated, and it cannot be bound.
    """
    types = [(entry.dtype, entry.shape, -1) for entry in entries]
    numbers = dict.fromkeys(types)
    if any(dtype not in DTYPE_BITS for dtype, _, _ in numbers):
        for row, entry in enumerate(entries):
            if entry.dtype not in DTYPE_BITS:
                types[row] = (entry.dtype, entry.shape, max(entry.data_offsets[1] - entry.data_offsets[0], 0))
        numbers = dict.fromkeys(types)
    order = {kind: number for number, kind in enumerate(numbers)}
    ids = np.fromiter(map(order.__getitem__, types), dtype=np.uint32, count=len(types))
    kinds = []
    for number, (dtype, shape, stated) in enumerate(order):
        try:
            kinds.append(TensorKind(dtype, shape, stated if stated >= 0 else _nbytes(dtype, shape)))
        except _ImpossibleSize as error:
            raise HeaderError(path, names[int(np.argmax(ids == number))], error.found, error.expected) from error
    return tuple(kinds), ids


class _ImpossibleSize(Exception):
    """A shape that no tensor can have."""

    def __init__(self, found: str, expected: str) -> None:
        super().__init__(found)
        self.found = found
        self.expected = expected


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    if len(shape) > MAX_DIMENSIONS:
        raise _ImpossibleSize(f"{len(shape)} dimensions", f"at most {MAX_DIMENSIONS}")
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits > 8 * MAX_INTEGER:
        raise _ImpossibleSize(f"shape {list(shape)} of {dtype}, more than 2^63 bytes", "a size that a file can have")
    if bits % 8:
        raise _ImpossibleSize(f"shape {list(shape)} of {dtype}, {bits} bits", "a whole number of bytes")
    return bits // 8


def _check_spans(
    names: list[str],
    kinds: tuple[TensorKind, ...],
    kind_ids: npt.NDArray[np.uint32],
    offsets: npt.NDArray[np.int64],
    path: Path,
) -> None:
    """Each span is its shape times its dtype, and not reversed (both offsets are already within 0..2^63-1)."""
    spans = offsets[:, 1] - offsets[:, 0]
    expected = np.array([kind.nbytes for kind in kinds], dtype=np.int64)[kind_ids]
    wrong = np.flatnonzero((spans < 0) | (spans != expected))
    if len(wrong):
        row = int(wrong[0])
        begin, end = offsets[row].tolist()
        kind = kinds[int(kind_ids[row])]
        if end < begin:
            raise HeaderError(path, names[row], f"data_offsets [{begin}, {end}]", "an end that is not before the begin")
        found = f"data_offsets [{begin}, {end}], a span of {end - begin} bytes"
        size = f"{kind.nbytes} bytes for shape {list(kind.shape)} of {kind.dtype}"
        more = f" ({len(wrong) - 1} more tensors are wrong)" if len(wrong) > 1 else ""
        raise HeaderError(path, names[row], found + more, size)


def _check_tiling(names: list[str], offsets: npt.NDArray[np.int64], path: Path, data_bytes: int) -> None:
    """The spans follow one another from 0 to the file's end: no gap, no overlap, nothing past it, nothing after it."""
    order = np.lexsort((offsets[:, 1], offsets[:, 0]))
    begins = offsets[order, 0]
    ends = np.concatenate((np.zeros(1, dtype=np.int64), offsets[order, 1]))
    wrong = np.flatnonzero(begins != ends[:-1])
    if len(wrong):
        place = int(wrong[0])
        name, begin, before = names[int(order[place])], int(begins[place]), int(ends[place])
        previous = f"the end of {show_name(names[int(order[place - 1])])}" if place else "the data's start"
        what = f"an overlap of {before - begin} bytes" if begin < before else f"a gap of {begin - before} bytes"
        raise HeaderError(path, name, f"{what}: it begins at {begin}", f"it to begin at {before}, {previous}")
    end = int(ends[-1])
    if end != data_bytes:
        last = names[int(order[-1])] if names else None
        kind = "the file is cut" if end > data_bytes else "the file has bytes that no tensor owns"
        found = f"tensors that end at {end} and {data_bytes} bytes after the header ({kind})"
        raise HeaderError(path, last, found, f"{end} bytes after the header")


def _read_fully(descriptor: int, count: int, offset: int) -> bytes:
    """Up to `count` bytes from `offset`, fewer only at the file's end."""
    pieces = []
    while count:
        piece = os.pread(descriptor, count, offset)
        if not piece:
            break
        pieces.append(piece)
        count -= len(piece)
        offset += len(piece)
    return b"".join(pieces)
