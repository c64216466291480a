"""Which files make up a checkpoint folder, and the stamp that tells whether any of them has changed."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from k3ray.workers.checkpoint.index_file import find_index_file
from k3ray.workers.checkpoint.index_table import Shard
from k3ray.workers.failure import Failure

SUFFIX = ".safetensors"
PUBLISHED_SIZES = "shard_sizes.txt"
_SIZE_LINE = re.compile(rb"\s*([!-~]+)\s+([0-9]{1,18})\s*")


class CheckpointError(Failure):
    """A folder that is not a checkpoint, or not a whole one."""

    def __init__(self, path: Path, found: str, expected: str) -> None:
        self.path = path
        super().__init__(f"{path}: found {found}, expected {expected}")


class NoCheckpointFolder(CheckpointError):
    """A path that is no folder: of a mistyped command rather than of a damaged checkpoint."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class ShardFiles:
    """The shards of a folder by name, the index file or None, and the stamp over every file's size, times and inode."""

    directory: Path
    shards: tuple[Shard, ...]
    index_path: Path | None
    stamp: str


def list_shard_files(directory: Path) -> ShardFiles:
    """Look at a checkpoint folder; raises CheckpointError when it is none or a file cannot be looked at."""
    chosen = shard_names_in(directory)
    directory = directory.resolve()
    index_path = find_index_file(directory)
    digest = hashlib.blake2b(digest_size=16)
    shards = []
    for name in chosen + ([index_path.name] if index_path else []):
        try:
            stat = (directory / name).stat()
        except OSError as error:
            found = f"a file that cannot be looked at ({error.strerror})"
            raise CheckpointError(directory / name, found, "a shard, or a link to one") from error
        digest.update(repr((name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)).encode())
        if name in chosen:
            shards.append(Shard(name, stat.st_size, stat.st_mtime_ns))
    return ShardFiles(directory, tuple(shards), index_path, digest.hexdigest())


def shard_names_in(directory: Path) -> list[str]:
    """The names of a folder's shards, ascending, links to nowhere included; raises NoCheckpointFolder.

    A name with a leading dot is another program's (macOS leaves `._model...` beside every file).
    """
    try:
        with os.scandir(directory) as entries:
            found = [entry for entry in entries if entry.name.endswith(SUFFIX) and not entry.name.startswith(".")]
    except OSError as error:
        expected = "a folder with a checkpoint's .safetensors files"
        raise NoCheckpointFolder(directory, f"no folder that can be read ({error.strerror})", expected) from error
    return sorted(entry.name for entry in found if not _is_folder(entry))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def published_sizes(directory: Path) -> dict[str, int]:
    """Bytes of each shard from a `shard_sizes.txt` of lines `name bytes`; empty where there is no such file.

    Raises CheckpointError for a line that is none.
    """
    path = directory / PUBLISHED_SIZES
    if not path.is_file():
        return {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise CheckpointError(path, f"a file that cannot be read ({error.strerror})", "sizes of shards") from error
    sizes = {}
    for number, line in enumerate(lines, 1):
        match = _SIZE_LINE.fullmatch(line)
        if match is None or (name := match[1].decode("ascii")) in sizes:
            raise CheckpointError(path, f"line {number}: {line[:80]!r}", "a shard's name, once, and its bytes")
        sizes[name] = int(match[2])
    return sizes
