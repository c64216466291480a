"""A stage's snapshot as others read it: the file of the same host, or chunks with their digests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from k3ray.cluster.snapshot_files import NoTemporaryRoom, SnapshotFile, deal_out
from k3ray.workers.held_snapshot import CHUNK_BYTES, HeldSnapshot, SnapshotGone, chunk_digest

PIECES = [pa.py_buffer(bytes([number]) * size) for number, size in enumerate((3, CHUNK_BYTES, 1, CHUNK_BYTES // 2))]
WHOLE = b"".join(piece.to_pybytes() for piece in PIECES)


def test_chunks_are_the_pieces_bytes() -> None:
    held = HeldSnapshot(iter(PIECES))
    assert held.place.total_bytes == len(WHOLE)
    for offset in (0, 5, CHUNK_BYTES, len(WHOLE) - 1):
        chunk = held.chunk(offset)
        assert chunk.contents == WHOLE[offset : offset + CHUNK_BYTES]
        assert chunk.digest == chunk_digest(offset, chunk.contents) != chunk_digest(offset + 1, chunk.contents)
    held.close()
    with pytest.raises(SnapshotGone, match="let go of"):
        held.chunk(0)


def test_the_same_host_reads_the_file_itself_also_after_it_was_let_go_of() -> None:
    held = HeldSnapshot(iter(PIECES))
    adopted = SnapshotFile.adopt(held.place)
    held.close()
    assert b"".join(piece.to_pybytes() for piece in adopted.pieces()) == WHOLE and adopted.total_bytes == len(WHOLE)


def test_another_file_under_the_same_path_is_refused(tmp_path: Path) -> None:
    held = HeldSnapshot(iter(PIECES))
    other = tmp_path / "fd"
    other.write_bytes(b"\0" * (16 + len(WHOLE)))
    with pytest.raises(OSError, match="is not the snapshot that a stage has written: is it on another host"):
        SnapshotFile.adopt(replace(held.place, path=other))


def test_no_room_is_told_when_a_piece_is_written() -> None:
    """A restore point must not be moved to a snapshot whose last bytes are still in a buffer, with nowhere to go."""
    file = SnapshotFile()
    file._file.close()
    file._file = Path("/dev/full").open("w+b")  # noqa: SIM115
    with pytest.raises(OSError, match="No space left"):
        file.add(pa.py_buffer(b"a few bytes"))
    with pytest.raises(OSError, match="No space left"):
        file.write(b"a few bytes")
    del file


def test_a_state_that_finds_no_temporary_room_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: SnapshotFile, piece: pa.Buffer) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SnapshotFile, "add", full)
    with pytest.raises(NoTemporaryRoom, match=r"\(No space left on device\): make room there, or .* TMPDIR"):
        deal_out([(0, PIECES[0])], [range(9)])
