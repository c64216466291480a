"""The index on disk, once per host: written beside and renamed, proven when opened, mapped by every process.

Knows how columns become a file and where it lies; index_build makes them. Layout: magic, 8-byte length of the record,
16-byte digest over all that follows, the record (JSON), zeros to a multiple of 64, the four columns.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import platformdirs

from k3ray.workers.checkpoint.header import TensorKind
from k3ray.workers.checkpoint.index_table import IndexColumns, Shard, TensorIndex
from k3ray.workers.checkpoint.names import NameTable
from k3ray.workers.half_written import beside

MAGIC = b"K3RAYIX1"  # its last character counts the layouts
_ALIGNMENT = 64
_HEAD = len(MAGIC) + 8 + 16
_COLUMNS = (("keys", np.uint64), ("begins", np.int64), ("shard_ids", np.uint32), ("kind_ids", np.uint32))
_ROW_BYTES = sum(np.dtype(dtype).itemsize for _, dtype in _COLUMNS)


class _Record(msgspec.Struct):
    """Everything of an index but its columns. stamp: of the files it was made from."""

    stamp: str
    tensors: int
    shards: list[tuple[str, int, int]]
    kinds: list[tuple[str, tuple[int, ...], int]]
    templates: list[str]
    fingerprint: str
    index_file: str | None
    stated_bytes: int | None


def cache_directories() -> list[Path]:
    """Where index files may be kept, best first: the user's cache, then a private folder among temporary files."""
    user = os.geteuid()
    return [platformdirs.user_cache_path("k3ray") / "index", Path(tempfile.gettempdir()) / f"k3ray-{user}" / "index"]


def usable_directory(directories: list[Path]) -> Path | None:
    """The first of the directories that is ours, private to us and writable, made when missing; None when none is."""
    for directory in directories:
        with suppress(OSError):
            directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            directory.mkdir(mode=0o700, exist_ok=True)
            if (
                _is_own(directory.parent, 0o002)
                and _is_own(directory, 0o022)
                and os.access(directory, os.W_OK | os.X_OK)
            ):
                return directory
    return None


def cache_path(cache: Path, directory: Path, stamp: str) -> Path:
    """The file of one checkpoint folder in one state."""
    place = hashlib.blake2b(os.fsencode(directory), digest_size=8).hexdigest()
    return cache / f"{place}-{stamp}.k3index"


def load(path: Path, directory: Path, stamp: str) -> TensorIndex | None:
    """The index kept in `path`, its columns mapped; None when there is none, or it is damaged or of other files."""
    try:
        with path.open("rb") as file:
            view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError):  # an empty file cannot be mapped
        return None
    if len(view) < _HEAD or bytes(view[: len(MAGIC)]) != MAGIC:
        return None
    length = int.from_bytes(view[len(MAGIC) : len(MAGIC) + 8], "little")
    if hashlib.blake2b(view[_HEAD:], digest_size=16).digest() != bytes(view[_HEAD - 16 : _HEAD]):
        return None
    try:
        record = msgspec.json.decode(view[_HEAD : _HEAD + length], type=_Record)
    except msgspec.MsgspecError:
        return None
    start = _aligned(_HEAD + length)
    if record.stamp != stamp or len(view) != start + record.tensors * _ROW_BYTES:
        return None
    columns: dict[str, Any] = {}
    for name, dtype in _COLUMNS:
        columns[name] = np.frombuffer(view, dtype=dtype, count=record.tensors, offset=start)
        start += columns[name].nbytes
    return TensorIndex(
        directory=directory,
        shards=tuple(Shard(*shard) for shard in record.shards),
        kinds=tuple(TensorKind(*kind) for kind in record.kinds),
        names=NameTable(record.templates),
        columns=IndexColumns(**columns),
        fingerprint=record.fingerprint,
        index_file=record.index_file,
        stated_bytes=record.stated_bytes,
    )


def store(index: TensorIndex, path: Path, stamp: str) -> bool:
    """Write the index beside `path` and rename it there; False when the disk does not take it."""
    record = _Record(
        stamp=stamp,
        tensors=len(index),
        shards=[(shard.name, shard.file_bytes, shard.mtime_ns) for shard in index.shards],
        kinds=[(kind.dtype, kind.shape, kind.nbytes) for kind in index.kinds],
        templates=index.names.templates,
        fingerprint=index.fingerprint,
        index_file=index.index_file,
        stated_bytes=index.stated_bytes,
    )
    text = msgspec.json.encode(record)
    padding = bytes(_aligned(_HEAD + len(text)) - _HEAD - len(text))
    columns: list[Any] = [np.ascontiguousarray(getattr(index.columns, name), dtype=dtype) for name, dtype in _COLUMNS]
    digest = hashlib.blake2b(digest_size=16)
    for piece in (text, padding, *columns):
        digest.update(piece)
    try:
        with beside(path.parent, ".writing-") as (file, written):
            file.write(MAGIC + len(text).to_bytes(8, "little") + digest.digest())
            for piece in (text, padding, *columns):
                file.write(piece)
            file.flush()
            written.replace(path)
    except OSError:
        return False
    return True


def remove_older(path: Path) -> None:
    """Remove what was kept of the same folder in earlier states; processes that have it mapped keep it."""
    place = path.name.split("-")[0]
    for other in path.parent.glob(f"{place}-*.k3index"):
        if other != path:
            with suppress(OSError):
                other.unlink()


def _is_own(path: Path, others: int) -> bool:
    """A real folder of ours into which `others` (mode bits) may not write: another user could plant an index there."""
    info = path.lstat()
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & others


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT
