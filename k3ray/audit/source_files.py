"""A checkpoint's files as the audit reads them: in ranges, every byte counted and hashed, from a folder or elsewhere.

Knows nothing of tensors. http_files.py reads the same from a server.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from pathlib import Path
from typing import Any, Protocol

from k3ray.audit.snapshot import SourceFile, SourceKind
from k3ray.workers.checkpoint.shard_files import list_shard_files
from k3ray.workers.failure import Failure

_COMMIT = re.compile(r"[0-9a-f]{40}")


class SourceError(Failure):
    """A file of the audited checkpoint that cannot be read as it should be."""


class Ledger:
    """What was read of which file. Usable from threads, as long as one file is read by one thread at a time."""

    def __init__(self) -> None:
        self.requests = 0
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        self._fetched: dict[str, int] = {}
        self._ranges: dict[str, int] = {}
        self._hashes: dict[str, Any] = {}
        self._whole: set[str] = set()
        self._places: dict[str, list[tuple[int, int]]] = {}

    def count_request(self) -> None:
        """One more request was sent."""
        with self._lock:
            self.requests += 1

    def count_bytes(self, name: str, count: int) -> None:
        """So many bytes of the file's content arrived, whatever becomes of them."""
        with self._lock:
            self._fetched[name] = self._fetched.get(name, 0) + count

    def keep(self, name: str, data: bytes, size: int, begin: int | None = None) -> None:
        """The range from `begin` (None: the whole file) arrived complete and is used; size: of the file.

        Ranges of one file come in ascending order, each byte once: their hash is over them in that order.
        """
        with self._lock:
            self._sizes[name] = size
            if begin is None:
                self._whole.add(name)
            elif data:
                self._add_place(name, begin, begin + len(data))
            else:
                return  # nothing lies there
            self._ranges[name] = self._ranges.get(name, 0) + 1
            self._hashes.setdefault(name, hashlib.sha256()).update(data)

    def _add_place(self, name: str, begin: int, end: int) -> None:
        places = self._places.setdefault(name, [])
        assert not places or begin >= places[-1][1], f"{name}: {begin} read after {places[-1]}"
        if places and places[-1][1] == begin:
            begin = places.pop()[0]
        places.append((begin, end))

    def note_size(self, name: str, size: int) -> None:
        """The file is known with its size, and may never be read."""
        with self._lock:
            self._sizes.setdefault(name, size)

    def size(self, name: str) -> int | None:
        """The file's size, None before anything is known of it."""
        return self._sizes.get(name)

    @property
    def fetched_bytes(self) -> int:
        """Bytes of content that arrived, of all files."""
        return sum(self._fetched.values())

    def rows(self) -> tuple[SourceFile, ...]:
        """One row a file, by name."""
        rows = []
        for name in sorted(self._sizes.keys() | self._fetched.keys()):
            digest = self._hashes.get(name)
            rows.append(
                SourceFile(
                    name=name,
                    bytes=self._sizes.get(name),
                    sha256=digest.hexdigest() if digest else "",
                    fetched_bytes=self._fetched.get(name, 0),
                    ranges=self._ranges.get(name, 0),
                    sha256_of="" if not digest else "whole file" if name in self._whole else "fetched ranges",
                    places=tuple(self._places.get(name, ())),
                )
            )
        return tuple(rows)


class SourceFiles(Protocol):
    """Where a checkpoint's files are. address: for people, without credentials."""

    kind: SourceKind
    address: str
    ledger: Ledger

    @property
    def revision(self) -> str:
        """The commit, or its moving name, that the files belong to; "" where none is known."""
        ...

    def shard_names(self, named: tuple[str, ...]) -> tuple[str, ...]:
        """The shards that are there, given those that the index names."""
        ...

    def read_whole(self, name: str, limit: int) -> bytes | None:
        """A small file's content, at most `limit` bytes; None when there is no such file. Raises SourceError."""
        ...

    def read(self, name: str, begin: int, end: int) -> bytes:
        """The bytes begin..end of a file, fewer only where the file ends before. Raises SourceError."""
        ...


class DirectoryFiles:
    """A checkpoint in a folder of this machine."""

    def __init__(self, directory: Path) -> None:
        """Look at the folder; raises CheckpointError when it is none."""
        listed = list_shard_files(directory)
        self.directory = listed.directory
        self.address = str(listed.directory)
        self.ledger = Ledger()
        self._shards = tuple(shard.name for shard in listed.shards)
        self.kind: SourceKind = "directory" if self._shards else "config and index only"
        for shard in listed.shards:
            self.ledger.note_size(shard.name, shard.file_bytes)

    @property
    def revision(self) -> str:
        """The commit of a hub's cache folder, which is named so."""
        return self.directory.name if _COMMIT.fullmatch(self.directory.name) else ""

    def shard_names(self, named: tuple[str, ...]) -> tuple[str, ...]:
        """Every shard in the folder."""
        return self._shards

    def read_whole(self, name: str, limit: int) -> bytes | None:
        """A small file's content; None when there is no such file."""
        path = self.directory / name
        if not path.exists():
            return None
        try:
            with path.open("rb") as file:
                data = file.read(limit + 1)
        except OSError as error:
            raise SourceError(f"{path}: cannot be read ({error.strerror}); correct that and audit again") from error
        if len(data) > limit:
            raise SourceError(f"{path}: found more than {limit} bytes, expected a small file")
        self.ledger.count_bytes(name, len(data))
        self.ledger.keep(name, data, len(data))
        return data

    def read(self, name: str, begin: int, end: int) -> bytes:
        """The bytes begin..end of a file, fewer only where it ends before."""
        pieces, place = [], begin
        try:
            with (self.directory / name).open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(begin)
                while begin < end and (piece := file.read(min(end - begin, 1 << 30))):
                    pieces.append(piece)
                    begin += len(piece)
        except OSError as error:
            found = f"cannot be read ({error.strerror})"
            raise SourceError(f"{self.directory / name}: {found}; correct that and audit again") from error
        known = self.ledger.size(name)
        if known is not None and known != size:
            found = f"found {size} bytes, expected the {known} of before: it changed while it was audited"
            raise SourceError(f"{self.directory / name}: {found}; audit a finished download")
        data = b"".join(pieces)
        self.ledger.count_bytes(name, len(data))
        self.ledger.keep(name, data, size, place)
        return data
