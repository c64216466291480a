"""The journal of a part file, and the checksums of whole ones."""

from __future__ import annotations

import errno
import hashlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3ray.download.block_journal import BLOCK_BYTES, Block, BlockJournal, digest_of, read_blocks
from k3ray.download.checksums import Checksum, hash_file

SHA = Checksum("sha256", "ab" * 32)
COMMIT = "9f62e4e9fffbd0a83ddd60e1c209d828994b3569"


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 40)), max_size=20), st.data())
def test_a_journal_reads_as_the_bytes_that_were_last_written(
    tmp_path_factory: pytest.TempPathFactory, spans: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Whatever was appended, and wherever the file is torn: the blocks are disjoint, ascending, and the newest."""
    path = tmp_path_factory.mktemp("journal") / "file.blocks"
    journal = BlockJournal(path, 140, SHA)
    owner: dict[int, int] = {}
    lengths = [path.stat().st_size]
    for number, (begin, count) in enumerate(spans):
        journal.append(Block(begin, begin + count, f"{number:032x}"))
        lengths.append(path.stat().st_size)
    journal.close()
    text = path.read_bytes()
    cut = data.draw(st.integers(0, len(text)))
    path.write_bytes(
        text[:cut] + data.draw(st.sampled_from([b"", b"\0" * 30, b"12 9 zz\n", b"5 400 " + b"0" * 32 + b"\n"]))
    )
    whole = max((n for n, length in enumerate(lengths) if length <= cut), default=None)
    for number, (begin, count) in enumerate(spans[:whole] if whole is not None else []):
        dropped = {owner[place] for place in range(begin, begin + count) if place in owner}
        owner = {place: who for place, who in owner.items() if who not in dropped}
        owner |= dict.fromkeys(range(begin, begin + count), number)
    expected = sorted({(spans[who][0], sum(spans[who]), f"{who:032x}") for who in owner.values()})
    found = read_blocks(path, 140, SHA)
    assert [(block.begin, block.end, block.digest) for block in found] == expected
    opened = BlockJournal(path, 140, SHA)
    assert opened.blocks == found and opened.num_bytes == len(owner)
    opened.append(Block(0, 140, "f" * 32))
    opened.close()
    assert read_blocks(path, 140, SHA) == [Block(0, 140, "f" * 32)]


def test_a_journal_of_another_file_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "file.blocks"
    journal = BlockJournal(path, 10, SHA)
    journal.append(Block(0, 10, digest_of(b"0123456789")))
    journal.close()
    for size, checksum in ((11, SHA), (10, Checksum("sha256", "cd" * 32)), (10, Checksum("git-sha1", "ab" * 20))):
        assert read_blocks(path, size, checksum) == []
    assert len(read_blocks(path, 10, SHA)) == 1  # looking does not change it
    BlockJournal(path, 11, SHA).close()
    assert read_blocks(path, 10, SHA) == []


def test_a_block_larger_than_any_that_is_written_is_not_believed(tmp_path: Path) -> None:
    """A block is read whole to be compared: its size is memory."""
    path, size = tmp_path / "file.blocks", 17 << 30
    journal = BlockJournal(path, size, SHA)
    journal.append(Block(0, BLOCK_BYTES, "a" * 32))
    journal.append(Block(BLOCK_BYTES, size, "b" * 32))
    journal.append(Block(size - 1, size, "c" * 32))
    journal.close()
    assert read_blocks(path, size, SHA) == [Block(0, BLOCK_BYTES, "a" * 32)]


def test_half_a_line_on_a_full_disk_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "file.blocks"
    journal = BlockJournal(path, 100, SHA)
    real, text = journal._file, path.read_bytes()

    def write(data: bytes) -> int:
        if len(data) < 40:
            raise OSError(errno.ENOSPC, "No space left on device")
        return int(real.write(data[:7]))

    journal._file = SimpleNamespace(
        write=write, tell=real.tell, seek=real.seek, truncate=real.truncate, close=real.close
    )  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space"):
        journal.append(Block(0, 10, "0" * 32))
    assert path.read_bytes() == text and journal.blocks == []
    journal.close()


def test_checksums_are_those_that_git_and_sha256sum_give(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"hello\n")
    git, sha = Checksum.from_text("ce013625030ba8dba906f756967f9e9ca394464a"), Checksum.from_text(f'W/"{"A" * 64}"')
    assert git is not None and hash_file(path, git) == git.value  # `git hash-object` of hello and a line's end
    assert sha == Checksum("sha256", "a" * 64)
    assert hash_file(path, SHA) == hashlib.sha256(b"hello\n").hexdigest()
    assert [Checksum.from_text(text) for text in ("", "a" * 39, "g" * 40, '"x"')] == [None] * 4
