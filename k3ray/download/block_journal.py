"""Which extents of a part file were written, each with its digest: an append-only text file beside the part.

Data is written before its line, and every line carries the digest of the data, so neither a kill nor a power cut can
make a resume trust bytes that are not there. The journal stays after the file is complete: then it says which block of
a damaged file to fetch again. Knows nothing of the network.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

from k3ray.download.checksums import Checksum

BLOCK_BYTES = 8 << 20


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
        self._head = f"k3ray-blocks 1 {size} {checksum}\n".encode()
        self.blocks: list[Block] = []
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b", buffering=0)
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
        self._insert(block)

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
        data = self._file.read()
        if not data.startswith(self._head):
            self.clear()
            return
        place = len(self._head)
        while (stop := data.find(b"\n", place)) >= 0:
            block = self._parse(data[place:stop])
            if block is None:
                break
            self._insert(block)
            place = stop + 1
        self._file.seek(place)
        self._file.truncate()

    def _parse(self, line: bytes) -> Block | None:
        words = line.split(b" ")
        if len(words) != 3 or not (words[0].isdigit() and words[1].isdigit() and len(words[2]) == 32):
            return None
        begin, end = int(words[0]), int(words[1])
        if not 0 <= begin < end <= self._size or not words[2].isalnum():
            return None
        return Block(begin, end, words[2].decode("ascii"))

    def _insert(self, block: Block) -> None:
        low = bisect_left(self.blocks, block.begin, key=_end)
        low += low < len(self.blocks) and self.blocks[low].end == block.begin
        high = low
        while high < len(self.blocks) and self.blocks[high].begin < block.end:
            high += 1
        self.blocks[low:high] = [block]


def _end(block: Block) -> int:
    return block.end


def read_blocks(path: Path, size: int, checksum: Checksum) -> list[Block]:
    """The blocks that a journal records for a file of that size and checksum, without making or changing one."""
    try:
        head = path.open("rb").readline()
    except OSError:
        return []
    if head != f"k3ray-blocks 1 {size} {checksum}\n".encode():
        return []
    journal = BlockJournal(path, size, checksum)
    journal.close()
    return journal.blocks
