"""Which extents of a part file were written, each with its digest: an append-only text file beside the part.

Data is written before its line, and every line carries the digest of the data, so neither a kill nor a power cut can
make a resume trust bytes that are not there. The journal stays after the file is complete: then it says which block of
a damaged file to fetch again. Knows nothing of the network.
"""

from __future__ import annotations

import hashlib
import os
import re
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

from k3ray.download.checksums import Checksum

BLOCK_BYTES = 8 << 20
_LINE = re.compile(rb"(\d{1,19}) (\d{1,19}) ([0-9a-f]{32})")


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes begin..end of the file and their BLAKE2b digest of 16 bytes, in hexadecimal."""

    begin: int
    end: int
    digest: str


def digest_of(data: bytes | memoryview) -> str:
    """The digest that a journal keeps of a block."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class BlockJournal:
    """The blocks of one file, ascending and disjoint; a new block drops those that it overlaps."""

    def __init__(self, path: Path, size: int, checksum: Checksum) -> None:
        """Open or begin the journal of a file of that size and checksum; one of another file is begun anew."""
        self.path = path
        self._size = size
        self._head = _head(size, checksum)
        self.blocks: list[Block] = []
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW  # never through a link into another file
        self._file = os.fdopen(os.open(path, flags, 0o666), "r+b", buffering=0)
        self._read()

    @property
    def num_bytes(self) -> int:
        """Bytes that the blocks cover."""
        return sum(block.end - block.begin for block in self.blocks)

    def append(self, block: Block) -> None:
        """Record a block whose bytes are in the part file."""
        line = f"{block.begin} {block.end} {block.digest}\n".encode()
        start = self._file.tell()
        written = 0
        try:
            while written < len(line):  # a full disk may take half a line
                written += self._file.write(line[written:])
        except OSError:
            self._file.seek(start)
            self._file.truncate()
            raise
        _insert(self.blocks, block)

    def clear(self) -> None:
        """Forget every block."""
        self.blocks.clear()
        self._file.seek(0)
        self._file.truncate()
        self._file.write(self._head)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read(self) -> None:
        """Take the lines up to the first that is not whole and sound; what comes after it is cut off."""
        found, place = _parse(self._file.read(), self._head, self._size)
        if place == 0:
            self.clear()
            return
        for block in found:
            _insert(self.blocks, block)
        self._file.seek(place)
        self._file.truncate()


def _insert(blocks: list[Block], block: Block) -> None:
    """Put a block at its place, in the place of those that it overlaps."""
    low = bisect_left(blocks, block.begin, key=_end)
    low += low < len(blocks) and blocks[low].end == block.begin
    high = low
    while high < len(blocks) and blocks[high].begin < block.end:
        high += 1
    blocks[low:high] = [block]


def _end(block: Block) -> int:
    return block.end


def read_blocks(path: Path, size: int, checksum: Checksum) -> list[Block]:
    """The blocks that a journal records for a file of that size and checksum, without making or changing one."""
    try:
        data = path.read_bytes()
    except OSError:
        return []
    blocks: list[Block] = []
    for block in _parse(data, _head(size, checksum), size)[0]:
        _insert(blocks, block)
    return blocks


def _head(size: int, checksum: Checksum) -> bytes:
    return f"k3ray-blocks 1 {size} {checksum}\n".encode()


def _parse(data: bytes, head: bytes, size: int) -> tuple[list[Block], int]:
    """The blocks of the sound lines, and where these end; 0 when the journal is another file's."""
    if not data.startswith(head):
        return [], 0
    found, place = [], len(head)
    while (stop := data.find(b"\n", place)) >= 0:
        match = _LINE.fullmatch(data, place, stop)
        if match is None:
            break
        begin, end = int(match[1]), int(match[2])
        if not begin < end <= min(size, begin + BLOCK_BYTES):  # a block is read whole: its size is memory
            break
        found.append(Block(begin, end, match[3].decode("ascii")))
        place = stop + 1
    return found, place
