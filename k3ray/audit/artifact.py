"""A checkpoint opened for the audit: its config, its index, its headers' tensors, and bytes of chosen tensors.

The same from a folder and from a server: both are read in ranges through SourceFiles, and the headers are proven by the
reader that a run uses.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from k3ray.audit.reading import read_each
from k3ray.audit.source_files import SourceFiles
from k3ray.workers.checkpoint.binding import BindError, Binding, bind, find_prefix
from k3ray.workers.checkpoint.header import LENGTH_BYTES, ShardHeader, header_length, parse_header
from k3ray.workers.checkpoint.index_build import build_index, build_names
from k3ray.workers.checkpoint.index_file import MAX_BYTES as MAX_INDEX_BYTES
from k3ray.workers.checkpoint.index_file import NAMES as INDEX_NAMES
from k3ray.workers.checkpoint.index_file import IndexFile, read_index_file
from k3ray.workers.checkpoint.index_table import Shard, TensorEntry, TensorIndex
from k3ray.workers.checkpoint.shard_files import PUBLISHED_SIZES, CheckpointError, ShardFiles
from k3ray.workers.checkpoint.tensors import ARRAY_DTYPES
from k3ray.workers.failure import Failure
from k3ray.workers.model.config import ModelConfig, read_config
from k3ray.workers.model.config_document import FILE_NAME as CONFIG_NAME
from k3ray.workers.model.config_document import MAX_FILE_BYTES as MAX_CONFIG_BYTES

FILES_AT_ONCE = 8  # over a network, of which mostly short ranges are read

Progress = Callable[[int, int], None]


class ArtifactError(Failure):
    """What the checkpoint's readers refused, with the place where the audit found it."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Artifact:
    """One checkpoint as it was found.

    root: config.json's object. stated: the index file, None without one. index: from the headers, or of names alone.
    header_bytes: of each shard, its length field included; empty where names are all. missing: shards that the index
    names and nobody has. unbound: why the text model cannot be bound, "" when it can.
    """

    files: SourceFiles
    config: ModelConfig
    root: dict[str, Any]
    stated: IndexFile | None
    index: TensorIndex
    header_bytes: dict[str, int]
    prefix: str
    missing: tuple[str, ...]
    binding: Binding | None
    unbound: str

    @property
    def total_bytes(self) -> int | None:
        """Bytes of all shard files, None where a size is unknown."""
        sizes = [shard.file_bytes for shard in self.index.shards]
        return sum(sizes) if all(sizes) else None

    def find(self, name: str) -> TensorEntry | None:
        """Where a tensor lies; None when it is not there, or only names are known."""
        return self.index.find(name) if self.index.has_shapes else None

    def read(self, entry: TensorEntry) -> npt.NDArray[Any]:
        """A whole tensor as stored (BF16: its bits), read-only; raises SourceError or ArtifactError."""
        dtype = ARRAY_DTYPES.get(entry.dtype)
        if dtype is None:
            found = f"found dtype {entry.dtype}, expected one of {', '.join(ARRAY_DTYPES)}"
            raise ArtifactError(f"{self.files.address}/{entry.path.name}: tensor {entry.name}: {found}", 1)
        data = self.files.read(entry.path.name, entry.offset, entry.offset + entry.nbytes)
        if len(data) != entry.nbytes:
            found = f"found {len(data)} bytes at {entry.offset}, expected {entry.nbytes}: the file was cut meanwhile"
            raise ArtifactError(f"{self.files.address}/{entry.path.name}: tensor {entry.name}: {found}", 1)
        return np.frombuffer(data, dtype=dtype).reshape(entry.shape)


def open_artifact(files: SourceFiles, progress: Progress = lambda done, total: None) -> Artifact:
    """Read config, index and every header; raises what the readers raise, with the files' own address in the message.

    progress: told (headers read, headers in all).
    """
    with tempfile.TemporaryDirectory(prefix="k3ray-audit-") as folder, _addressed(Path(folder), files.address):
        place = Path(folder)
        config_text = _stage(files, place, CONFIG_NAME, MAX_CONFIG_BYTES)
        config = read_config(place)
        assert config_text is not None  # read_config refused it otherwise
        index_path = next((place / name for name in INDEX_NAMES if _stage(files, place, name, MAX_INDEX_BYTES)), None)
        stated = read_index_file(index_path) if index_path else None
        shards = files.shard_names(stated.shard_names if stated else ())
        header_bytes: dict[str, int] = {}
        if shards:
            index, header_bytes = _read_index(files, place, shards, progress)
        elif index_path is not None and files.kind == "config and index only":
            _stage(files, place, PUBLISHED_SIZES, MAX_CONFIG_BYTES)
            index = build_names(place, index_path)
        else:
            wanted = " or ".join(INDEX_NAMES)
            raise CheckpointError(place, f"neither shards nor {wanted}", "a checkpoint: over HTTP its index is needed")
        binding, unbound = _bind(config, index)
        prefix = find_prefix(index)
        missing = tuple(sorted(set(stated.shard_names) - set(shards))) if stated and shards else ()
        root: dict[str, Any] = json.loads(config_text)
        unbound = unbound.replace(str(place), files.address)
    return Artifact(files, config, root, stated, index, header_bytes, prefix, missing, binding, unbound)


def _bind(config: ModelConfig, index: TensorIndex) -> tuple[Binding | None, str]:
    try:
        return bind(config, index), ""
    except BindError as error:
        return None, str(error)


def _stage(files: SourceFiles, place: Path, name: str, limit: int) -> bytes | None:
    """Fetch a small file and put it where the readers of folders find it; None when there is none."""
    (data,) = read_each([partial(files.read_whole, name, limit)], 1)
    if data is not None:
        (place / name).write_bytes(data)
    return data


@contextmanager
def _addressed(place: Path, address: str) -> Iterator[None]:
    """A failure that names the staged copy names the address instead."""
    try:
        yield
    except Failure as failure:
        message = str(failure)
        if str(place) not in message:
            raise
        raise ArtifactError(message.replace(str(place), address), failure.exit_code) from failure


def files_at_once(files: SourceFiles) -> int:
    """How many files are read at a time: several over a network, whose waits they share."""
    return FILES_AT_ONCE if files.kind == "http" else 1


def _read_index(
    files: SourceFiles, place: Path, shards: tuple[str, ...], progress: Progress
) -> tuple[TensorIndex, dict[str, int]]:
    """The index of every shard's header, read from its file by ranges, and the bytes of each header."""
    headers: dict[str, ShardHeader] = {}
    lengths: dict[str, int] = {}
    reads = read_each([partial(read_header, files, place / name) for name in shards], files_at_once(files))
    for header, length in reads:
        headers[header.path.name], lengths[header.path.name] = header, length
        progress(len(headers), len(shards))
    listed = tuple(Shard(name, headers[name].file_bytes, 0) for name in shards)
    return build_index(ShardFiles(place, listed, None, ""), read=lambda path: headers[path.name]), lengths


def read_header(files: SourceFiles, path: Path) -> tuple[ShardHeader, int]:
    """A shard's header by two ranges, its length and its JSON, proven against the file's size, and the bytes of both;
    raises HeaderError.
    """
    length_bytes = files.read(path.name, 0, LENGTH_BYTES)
    size = files.ledger.size(path.name) or 0
    length = header_length(path, length_bytes, size)
    text = files.read(path.name, LENGTH_BYTES, LENGTH_BYTES + length)
    return parse_header(text, path, size, LENGTH_BYTES + length), LENGTH_BYTES + length
