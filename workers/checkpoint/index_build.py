"""Makes the index of a checkpoint: every shard's header read and proven, and the index file closed against them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
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
    names = NameTable()
    stated = None
    if files.index_path is not None:
        stated = read_index_file(files.index_path, names)
        _check_present(stated, files)
    kinds: dict[TensorKind, int] = {}
    digest = hashlib.blake2b(digest_size=16)
    parts = []
    for shard in files.shards:
        header = read_header(files.directory / shard.name)
        digest.update(repr((shard.name, header.file_bytes, header.digest)).encode())
        parts.append(_read_part(header, names, kinds))
    columns = _sorted_columns(parts)
    _check_unique(columns, names, files)
    if stated is not None:
        _close(stated, columns, names, files)
    return TensorIndex(
        directory=files.directory,
        shards=files.shards,
        kinds=tuple(kinds),
        names=names,
        columns=columns,
        fingerprint=digest.hexdigest(),
        index_file=files.index_path.name if files.index_path else None,
        stated_bytes=stated.stated_bytes if stated else None,
    )


def build_names(directory: Path, path: Path) -> TensorIndex:
    """An index of names alone from the checkpoint's index file, for a folder that holds no shards.

    Shard sizes come from a published list (shard_sizes.txt) beside it, or are 0.
    """
    names = NameTable()
    stated = read_index_file(path, names)
    if not len(stated.keys):
        raise CheckpointError(path, "an index without a tensor", "the index of a checkpoint")
    order = np.argsort(stated.keys, kind="stable")
    sizes = published_sizes(directory)
    by_name = np.argsort(np.array(stated.shard_names))
    rank = np.empty(len(by_name), dtype=np.uint32)
    rank[by_name] = np.arange(len(by_name), dtype=np.uint32)
    nothing = np.zeros(len(order), dtype=np.int64)
    columns = IndexColumns(
        stated.keys[order], nothing, rank[stated.shard_ids[order]], np.zeros(len(order), dtype=np.uint32)
    )
    shards = tuple(Shard(name, sizes.get(name, 0), 0) for name in sorted(stated.shard_names))
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


def _close(stated: IndexFile, columns: IndexColumns, names: NameTable, files: ShardFiles) -> None:
    """Refuse an index file that names other tensors than the headers, or places one in another shard."""
    numbers = {shard.name: number for number, shard in enumerate(files.shards)}
    place = np.array([numbers[name] for name in stated.shard_names], dtype=np.uint32)
    order = np.argsort(stated.keys, kind="stable")
    keys = stated.keys[order]
    shard_ids = place[stated.shard_ids[order]] if len(order) else np.empty(0, dtype=np.uint32)
    if np.array_equal(keys, columns.keys) and np.array_equal(shard_ids, columns.shard_ids):
        return
    absent = ~np.isin(keys, columns.keys)
    unnamed = ~np.isin(columns.keys, keys)
    both, here, there = keys[~absent], shard_ids[~absent], columns.shard_ids[~unnamed]
    moved = here != there
    shards = [shard.name for shard in files.shards]
    rows = (
        [
            (key, f"is not in {shards[shard]}, where the index places it")
            for key, shard in _first(keys, shard_ids, absent)
        ]
        + [
            (key, f"is in {shards[shard]} and not in the index")
            for key, shard in _first(columns.keys, columns.shard_ids, unnamed)
        ]
        + [(key, f"is in {shards[shard]}, the index says another shard") for key, shard in _first(both, there, moved)]
    )
    count = int(absent.sum()) + int(unnamed.sum()) + int(moved.sum())
    listed = "".join(f"\n  {show_name(names.name(key))} {what}" for key, what in rows[:MAX_LISTED])
    more = f"\n  and {count - MAX_LISTED} more" if count > MAX_LISTED else ""
    raise IndexFileError(stated.path, f"{count} tensors unlike the shards:{listed}{more}\n ", "what the shards hold")


def _first(keys: Keys, shard_ids: npt.NDArray[np.uint32], chosen: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """(key, shard) of the first few chosen rows."""
    rows = np.flatnonzero(chosen)[:MAX_LISTED]
    return list(zip(keys[rows].tolist(), shard_ids[rows].tolist(), strict=True))
