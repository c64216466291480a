"""Opens a checkpoint's index: made once per host under a lock, kept in our cache, mapped by every process."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock, Timeout

from k3ray.workers.checkpoint import index_cache
from k3ray.workers.checkpoint.index_build import MissingShards, build_index, build_names
from k3ray.workers.checkpoint.index_table import TensorEntry, TensorIndex
from k3ray.workers.checkpoint.shard_files import CheckpointError, ShardFiles, list_shard_files

__all__ = ["CheckpointError", "TensorEntry", "TensorIndex", "open_index", "open_names", "open_part"]

LOCK_TIMEOUT_S = 600.0


def open_index(model_dir: Path, cache_dirs: list[Path] | None = None) -> TensorIndex:
    """The index of a checkpoint folder, its headers proven and closed against its index file when it has one.

    cache_dirs: where the index may be kept, the host's own places unless given. Where none is usable the index is
    made in this process's memory. Raises CheckpointError, HeaderError, IndexFileError or DuplicateTensor.
    """
    return _open(_files_with_shards(model_dir), cache_dirs, partial=False)


def open_part(model_dir: Path, cache_dirs: list[Path] | None = None) -> TensorIndex:
    """The index of a folder that may hold only some of the shards that its index file names; else as open_index.

    The shards that are here are proven and closed against the index file; a folder without one counts as whole.
    """
    files = _files_with_shards(model_dir)
    try:
        return _open(files, cache_dirs, partial=False)
    except MissingShards:
        return _open(files, cache_dirs, partial=True)


def _files_with_shards(model_dir: Path) -> ShardFiles:
    files = list_shard_files(model_dir)
    if not files.shards:
        found = "no .safetensors file" + (", only an index of them" if files.index_path else "")
        raise CheckpointError(files.directory, found, "a checkpoint's shards: give the folder they were downloaded to")
    return files


def _open(files: ShardFiles, cache_dirs: list[Path] | None, partial: bool) -> TensorIndex:
    cache = index_cache.usable_directory(index_cache.cache_directories() if cache_dirs is None else cache_dirs)
    if cache is None:
        return _build(files, partial)
    stamp = f"{files.stamp}-part" if partial else files.stamp  # what is kept of a part never passes for a whole
    path = index_cache.cache_path(cache, files.directory, stamp)
    index = index_cache.load(path, files.directory, stamp)
    return index or _build_once(files, path, stamp, partial)


def open_names(model_dir: Path) -> TensorIndex:
    """The names of a checkpoint from its index file alone, where the shards are not here: no shapes, no places."""
    files = list_shard_files(model_dir)
    if files.index_path is None:
        raise CheckpointError(
            files.directory, "no model.safetensors.index.json", "the checkpoint's index or its shards"
        )
    return build_names(files.directory, files.index_path)


def _build_once(files: ShardFiles, path: Path, stamp: str, partial: bool) -> TensorIndex:
    """Make and keep the index unless another process does so first."""
    try:
        with FileLock(path.with_suffix(".lock"), timeout=LOCK_TIMEOUT_S):
            index = index_cache.load(path, files.directory, stamp)
            if index is not None:
                return index
            index = _build(files, partial)
            if not index_cache.store(index, path, stamp):
                return index
            index_cache.remove_older(path)
    except (OSError, NotImplementedError, Timeout):  # a disk without locks: everyone makes their own
        return _build(files, partial)
    return index_cache.load(path, files.directory, stamp) or index


def _build(files: ShardFiles, partial: bool) -> TensorIndex:
    index = build_index(files, partial=partial)
    if list_shard_files(files.directory).stamp != files.stamp:
        found = "files that changed while their headers were read"
        raise CheckpointError(files.directory, found, "a finished download: wait for it and start again")
    return index
