"""Makes the index of a checkpoint: every shard's header read and proven, and the index file closed against them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from k3ray.workers.checkpoint.header import ShardHeader, TensorKind, read_header
from k3ray.workers.checkpoint.header_json import show_name
from k3ray.workers.checkpoint.index_file import IndexFile, IndexFileError, read_index_file
from k3ray.workers.checkpoint.index_table import IndexColumns, Shard, TensorIndex
from k3ray.workers.checkpoint.names import Keys, NameTable
from k3ray.workers.checkpoint.shard_files import CheckpointError, ShardFiles, published_sizes
from k3ray.workers.failure import Failure

MAX_LISTED = 20
_CHUNK = 1 << 16  # names turned into keys at a time, which bounds the temporaries


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


def build_index(files: ShardFiles) -> TensorIndex:
    """Index every shard of a checkpoint; raises HeaderError, DuplicateTensor, IndexFileError or CheckpointError."""
    stated = None
    if files.index_path is not None:
        stated = read_index_file(files.index_path)
        _check_present(stated, files)
    closing = _Closing(stated.places if stated else {})
    names = NameTable()
    kinds: dict[TensorKind, int] = {}
    digest = hashlib.blake2b(digest_size=16)
    parts = []
    for shard in files.shards:
        header = read_header(files.directory / shard.name)
        digest.update(repr((shard.name, header.file_bytes, header.digest)).encode())
        parts.append(_read_part(header, names, kinds))
        if stated is not None:
            closing.compare(shard.name, header.names)
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
    if stated is not None:
        closing.refuse_differences(stated.path, index)
    return index


def build_names(directory: Path, path: Path) -> TensorIndex:
    """An index of names alone from the checkpoint's index file, for a folder that holds no shards.

    Shard sizes come from a published list (shard_sizes.txt) beside it, or are 0.
    """
    stated = read_index_file(path)
    if not stated.places:
        raise CheckpointError(path, "an index without a tensor", "the index of a checkpoint")
    names = NameTable()
    tensors = list(stated.places)
    keys = np.concatenate([names.add(tensors[low : low + _CHUNK]) for low in range(0, len(tensors), _CHUNK)])
    numbers = {name: number for number, name in enumerate(stated.shard_names)}
    shard_ids = np.fromiter(map(numbers.__getitem__, stated.places.values()), dtype=np.uint32, count=len(tensors))
    order = np.argsort(keys, kind="stable")
    columns = IndexColumns(
        keys[order],
        np.zeros(len(order), dtype=np.int64),
        shard_ids[order],
        np.zeros(len(order), dtype=np.uint32),
    )
    sizes = published_sizes(directory)
    shards = tuple(Shard(name, sizes.get(name, 0), 0) for name in stated.shard_names)
    return TensorIndex(directory, shards, (), names, columns, "", path.name, stated.stated_bytes, has_shapes=False)


def _read_part(header: ShardHeader, names: NameTable, kinds: dict[TensorKind, int]) -> _Part:
    renumber = np.array([kinds.setdefault(kind, len(kinds)) for kind in header.kinds], dtype=np.uint32)
    kind_ids = renumber[header.kind_ids] if len(renumber) else header.kind_ids
    return _Part(names.add(header.names), header.begins, kind_ids)


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
        raise CheckpointError(stated.path, found, "all of them in this folder: finish the download")


class _Closing:
    """Compares the index file's tensors with the headers', a shard at a time, and keeps the first differences."""

    def __init__(self, places: dict[str, str]) -> None:
        self._places = places
        self._named = 0  # tensors of the headers that the index file names, in this shard or another
        self._problems: list[str] = []
        self._count = 0

    def compare(self, shard: str, names: list[str]) -> None:
        """Compare one shard's tensors with what the index file says of them."""
        places = list(map(self._places.get, names))
        if places.count(shard) == len(names):
            self._named += len(names)
            return
        for name, place in zip(names, places, strict=True):
            self._named += place is not None
            if place is None:
                self._note(f"{show_name(name)} is in {shard} and not in the index")
            elif place != shard:
                self._note(f"{show_name(name)} is in {shard}, the index says {place}")

    def refuse_differences(self, path: Path, index: TensorIndex) -> None:
        """Raise IndexFileError when the two do not name the same tensors in the same shards."""
        absent = len(self._places) - self._named
        if absent:
            missing = (item for item in self._places.items() if index.row(item[0]) is None)
            for name, place in islice(missing, MAX_LISTED):
                self._note(f"{show_name(name)} is not in {place}, where the index places it, nor in another shard")
            self._count += max(absent - MAX_LISTED, 0)
        if self._count:
            listed = "".join(f"\n  {problem}" for problem in self._problems)
            more = f"\n  and {self._count - MAX_LISTED} more" if self._count > MAX_LISTED else ""
            found = f"{self._count} tensors unlike the shards:{listed}{more}\n "
            raise IndexFileError(path, found, "what the shards hold")

    def _note(self, problem: str) -> None:
        self._count += 1
        if len(self._problems) < MAX_LISTED:
            self._problems.append(problem)
