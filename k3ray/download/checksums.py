"""What a file must hash to: the sha256 of a large file, or the git object id of a small one, as the hub states them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

READ_BYTES = 4 << 20
_FORMS = {"sha256": re.compile(r"[0-9a-f]{64}"), "git-sha1": re.compile(r"[0-9a-f]{40}")}


class RunningHash(Protocol):
    """The part of hashlib's objects that is used here."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Take more bytes."""

    def hexdigest(self) -> str:
        """Return the digest of everything so far."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """kind: sha256 (of the bytes) or git-sha1 (of a git blob with these bytes). value: lower-case hexadecimal."""

    kind: str
    value: str

    @classmethod
    def from_text(cls, text: str) -> Checksum | None:
        """The checksum that an etag or a metadata field holds: 64 digits are a sha256, 40 a git object id."""
        bare = text.removeprefix("W/").strip('"').lower()
        for kind, form in _FORMS.items():
            if form.fullmatch(bare):
                return cls(kind, bare)
        return None

    def start(self, size: int) -> RunningHash:
        """A hash to feed the file's `size` bytes to."""
        if self.kind == "sha256":
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)

    def __str__(self) -> str:
        return f"{self.kind} {self.value}"


def hash_file(path: Path, checksum: Checksum, read: Callable[[int], None] | None = None) -> str:
    """The hexadecimal digest, of the checksum's kind, of the file as it is; `read` is told of every piece's bytes.

    Raises OSError.
    """
    with path.open("rb", buffering=0) as file:
        running = checksum.start(path.stat().st_size)
        buffer = memoryview(bytearray(READ_BYTES))
        while count := file.readinto(buffer):
            running.update(buffer[:count])
            if read is not None:
                read(count)
    return running.hexdigest()
