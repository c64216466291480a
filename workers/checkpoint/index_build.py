"""Makes the index of a checkpoint: every shard's header read and proven, and the index file closed against them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from k3ray.workers.checkpoint.header import ShardHeader, TensorKind, read_header
from k3ray.workers.checkpoint.header_json import show_name
from k3ray.workers.checkpoint.index_file import IndexFile, IndexFileError, read_index_file
from k3ray.workers.checkpoint.index_table import IndexColumns, Shard, TensorIndex
from k3ray.workers.checkpoint.names import Keys, NameTable
from k3ray.workers.checkpoint.shard_files import CheckpointError, ShardFiles, published_sizes
from k3ray.workers.counted import counted
from k3ray.workers.failure import Failure

MAX_LISTED = 20
_CHUNK = 1 << 16  # names turned into keys at a time, which bounds the temporaries


class MissingShards(CheckpointError):
    """A folder that lacks shards which its index file names."""


class DuplicateTensor(Failure):
    """One tensor name in two shards."""

    def __init__(self, name: str, first: Path, second: Path) -> None:
        super().__init__(
            f"tensor {show_name(name)}: found in {first} and in {second.name}, expected in one shard. "
            "Keep the files of one download only in this folder."
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """One shard's columns in the header's order, kinds already numbered over the whole checkpoint."""

    keys: Keys
    begins: npt.NDArray[np.int64]
    kind_ids: npt.NDArray[np.uint32]


def build_index(
    files: ShardFiles, read: Callable[[Path], ShardHeader] = read_header, *, partial: bool = False
) -> TensorIndex:
    """Index every shard of a checkpoint; raises HeaderError, DuplicateTensor, IndexFileError or CheckpointError.

    read: where a shard's proven header comes from, when it is not the file itself. partial: shards that the index file
    names may be missing; then the fingerprint is of those that are here.
    """
    stated = None
    if files.index_path is not None:
        stated = read_index_file(files.index_path)
        if not partial:
            _check_present(stated, files)
    names = NameTable()
    kinds: dict[TensorKind, int] = {}
    digest = hashlib.blake2b(digest_size=16)
    parts = []
    closed = 0
    for shard in files.shards:
        header = read(files.directory / shard.name)
        digest.update(repr((shard.name, header.file_bytes, header.digest)).encode())
        tensors = pa.array(header.names, type=pa.large_string())
        parts.append(_read_part(header, tensors, names, kinds))
        if stated is not None:
            closed += _closes(tensors, stated.names_in(shard.name))
    columns = _sorted_columns(parts)
    _check_unique(columns, names, files)
    index = TensorIndex(
        directory=files.directory,
        shards=files.shards,
        kinds=tuple(kinds),
        names=names,
        columns=columns,
        fingerprint=digest.hexdigest(),
        index_file=files.index_path.name if files.index_path else None,
        stated_bytes=stated.stated_bytes if stated else None,
    )
    if stated is not None and closed < len(files.shards):
        raise IndexFileError(stated.path, _differences(stated, index), "what the shards hold")
    return index


def build_names(directory: Path, path: Path) -> TensorIndex:
    """An index of names alone from the checkpoint's index file, for a folder that holds no shards.

    Shard sizes come from a published list (shard_sizes.txt) beside it, or are 0.
    """
    stated = read_index_file(path)
    if not len(stated.names):
        raise CheckpointError(path, "an index without a tensor", "the index of a checkpoint")
    names = NameTable()
    chunks = [names.add(stated.names.slice(low, _CHUNK)) for low in range(0, len(stated.names), _CHUNK)]
    keys = np.concatenate(chunks)
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    twice = np.flatnonzero(keys[1:] == keys[:-1])
    if len(twice):
        name = show_name(names.name(int(keys[twice[0]])))
        raise IndexFileError(path, f"the tensor {name} more than once", "each tensor once")
    shard_ids = np.repeat(np.arange(len(stated.shard_names), dtype=np.uint32), np.diff(stated.starts))
    nothing = np.zeros(len(order), dtype=np.int64)
    columns = IndexColumns(keys, nothing, shard_ids[order], nothing.astype(np.uint32))
    sizes = published_sizes(directory)
    shards = tuple(Shard(name, sizes.get(name, 0), 0) for name in stated.shard_names)
    return TensorIndex(directory, shards, (), names, columns, "", path.name, stated.stated_bytes, has_shapes=False)


def _read_part(header: ShardHeader, tensors: pa.Array, names: NameTable, kinds: dict[TensorKind, int]) -> _Part:
    renumber = np.array([kinds.setdefault(kind, len(kinds)) for kind in header.kinds], dtype=np.uint32)
    kind_ids = renumber[header.kind_ids] if len(renumber) else header.kind_ids
    return _Part(names.add(tensors), header.begins, kind_ids)


def _sorted_columns(parts: list[_Part]) -> IndexColumns:
    keys = np.concatenate([part.keys for part in parts])
    order = np.argsort(keys, kind="stable")
    shard_ids = np.repeat(np.arange(len(parts), dtype=np.uint32), [len(part.keys) for part in parts])
    return IndexColumns(
        keys[order],
        np.concatenate([part.begins for part in parts])[order],
        shard_ids[order],
        np.concatenate([part.kind_ids for part in parts])[order],
    )


def _check_unique(columns: IndexColumns, names: NameTable, files: ShardFiles) -> None:
    twice = np.flatnonzero(columns.keys[1:] == columns.keys[:-1])
    if len(twice):
        row = int(twice[0])
        first, second = (files.directory / files.shards[int(columns.shard_ids[row + i])].name for i in (0, 1))
        raise DuplicateTensor(names.name(int(columns.keys[row])), first, second)


def _check_present(stated: IndexFile, files: ShardFiles) -> None:
    here = {shard.name for shard in files.shards}
    missing = sorted(set(stated.shard_names) - here)
    if missing:
        listed = ", ".join(missing[:MAX_LISTED]) + (", ..." if len(missing) > MAX_LISTED else "")
        found = f"{len(here)} of its {len(stated.shard_names)} shards; missing: {listed}"
        raise MissingShards(stated.path, found, "all of them in this folder: finish the download")


def _closes(tensors: pa.Array, stated: pa.Array) -> bool:
    """Whether the index file places exactly a shard's tensors in it.

    The shard's names are distinct, so when all of them are among as many stated ones, these are the same and distinct.
    """
    return len(tensors) == len(stated) and bool(pc.all(pc.is_in(tensors, value_set=stated), min_count=0).as_py())


def _differences(stated: IndexFile, index: TensorIndex) -> str:
    """How the index file and the headers differ: the first tensors and the count."""
    places: dict[str, str] = {}
    problems = []
    here = {shard.name for shard in index.shards}
    for shard in stated.shard_names:
        for name in stated.names_in(shard).to_pylist() if shard in here else ():
            if name in places:
                problems.append(f"{show_name(name)} is more than once in the index")
            places[name] = shard
            if index.row(name) is None:
                problems.append(f"{show_name(name)} is not in {shard}, where the index places it, nor in another shard")
    for row in range(len(index)):
        name, shard = index.name(row), index.path(row).name
        place = places.get(name)
        if place is None:
            problems.append(f"{show_name(name)} is in {shard} and not in the index")
        elif place != shard:
            problems.append(f"{show_name(name)} is in {shard}, the index says {place}")
    listed = "".join(f"\n  {problem}" for problem in problems[:MAX_LISTED])
    more = f"\n  and {len(problems) - MAX_LISTED} more" if len(problems) > MAX_LISTED else ""
    return f"{counted(len(problems), 'difference')} from the shards:{listed}{more}\n "
