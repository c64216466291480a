"""Measuring disk and memory: what is read, that it is bounded, what is left behind. Speeds are never asserted."""

from __future__ import annotations

import errno
import os
from collections import namedtuple
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from k3ray.cluster import devices
from k3ray.cluster.devices import (
    CHUNK,
    EXPERT,
    DeviceFailure,
    measurable_files,
    measure_bursts,
    measure_disk,
    measure_memory,
    written_file,
)
from k3ray.workers.tape.direct_io import DirectFile, DiskReadFailure


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of two pages and experts of an odd size, so that small files will do."""
    monkeypatch.setitem(devices.PIECES, CHUNK, 8192)
    monkeypatch.setitem(devices.PIECES, EXPERT, 10_001)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Every read that is made: (file, offset, bytes)."""
    made: list[tuple[str, int, int]] = []
    read = DirectFile.read

    def noted(file: DirectFile, slot: Any, offset: int, nbytes: int) -> Any:
        made.append((file.path.name, offset, nbytes))
        return read(file, slot, offset, nbytes)

    monkeypatch.setattr(DirectFile, "read", noted)
    return made


def make_file(path: Path, nbytes: int) -> Path:
    path.write_bytes(os.urandom(nbytes))
    return path


@pytest.mark.usefixtures("small_pieces")
def test_random_pieces_each_once_at_every_depth(tmp_path: Path, reads: list[tuple[str, int, int]]) -> None:
    files = [make_file(tmp_path / "a", 8192 * 20 + 5), make_file(tmp_path / "b", 8192 * 7)]
    speeds = measure_disk(files, seconds=60.0)
    assert [(speed.kind, speed.depth) for speed in speeds] == [(CHUNK, 1), (CHUNK, 16), (EXPERT, 1), (EXPERT, 16)]
    for speed in speeds:
        mine, reads[:] = reads[: speed.bytes_read // speed.piece_bytes], reads[speed.bytes_read // speed.piece_bytes :]
        assert len(set(mine)) == len(mine) and {nbytes for _, _, nbytes in mine} == {speed.piece_bytes}
        sizes = {"a": 8192 * 20 + 5, "b": 8192 * 7}
        assert all(offset + nbytes <= sizes[name] for name, offset, nbytes in mine)
        for name in sizes:
            offsets = sorted(offset for file, offset, _ in mine if file == name)
            assert all(later - earlier >= speed.piece_bytes for earlier, later in pairwise(offsets))
        if speed.kind == CHUNK:
            assert len(mine) == 27 and all(offset % 4096 == 0 for _, offset, _ in mine)
        else:
            assert len(mine) >= 18 and any(offset % 4096 for _, offset, _ in mine)
        if speed.depth == 1:
            assert [offset for _, offset, _ in mine] != sorted(offset for _, offset, _ in mine)
        assert speed.seconds > 0 and speed.bytes_per_s == speed.bytes_read / speed.seconds
    assert not reads


@pytest.mark.usefixtures("small_pieces")
def test_time_and_bytes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = make_file(tmp_path / "a", 8192 * 50)
    assert [speed.bytes_read for speed in measure_disk([file], seconds=0.0)] == [0, 0, 0, 0]
    monkeypatch.setattr(devices, "LARGEST_BYTES", 8192 * 3)
    assert measure_disk([file], seconds=60.0, kinds=(CHUNK,), depths=(2,))[0].bytes_read == 8192 * 3


def test_bursts_are_read_whole_and_no_piece_twice(tmp_path: Path, reads: list[tuple[str, int, int]]) -> None:
    files = [make_file(tmp_path / "a", 10_000 * 20 + 3000), make_file(tmp_path / "b", 10_000 * 5)]
    speed = measure_bursts(files, 10_000, depth=3, burst=7, seconds=60.0)
    assert (speed.kind, speed.piece_bytes, speed.depth) == (EXPERT, 10_000, 3)
    assert len(set(reads)) == len(reads) == 24 and speed.bytes_read == 240_000
    for name in ("a", "b"):
        offsets = sorted(offset for file, offset, _ in reads if file == name)
        assert all(later - earlier >= 10_000 for earlier, later in pairwise(offsets))
    assert measure_bursts(files, 10_000, 3, 7, seconds=0.0).bytes_read == 0


@pytest.mark.usefixtures("small_pieces")
def test_a_refused_o_direct_is_said_once_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = make_file(tmp_path / "a", 8192 * 9)
    open_file = os.open

    def refuse(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return open_file(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    said: list[str] = []
    speeds = measure_disk([file], seconds=60.0, say=said.append)
    assert not any(speed.direct for speed in speeds) and all(speed.bytes_read for speed in speeds)
    assert len(said) == 1 and "refuses O_DIRECT" in said[0]


@pytest.mark.usefixtures("small_pieces")
def test_a_disk_error_is_a_failure_not_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = make_file(tmp_path / "a", 8192 * 9)
    preadv = os.preadv

    def broken(descriptor: int, buffers: Any, offset: int) -> int:
        if offset >= 8192 * 4:
            raise OSError(errno.EIO, "Input/output error")
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(DiskReadFailure, match="EIO"):
        measure_disk([file], seconds=60.0)


@pytest.mark.usefixtures("small_pieces")
def test_which_files_are_measured(tmp_path: Path) -> None:
    enough = 4 * 10_001
    for name, nbytes in (("small", enough - 1), ("b", enough), ("a", 2 * enough)):
        make_file(tmp_path / name, nbytes)
    (tmp_path / "folder").mkdir()
    assert [file.name for file in measurable_files(tmp_path)] == ["a", "b"]
    assert measurable_files(tmp_path / "b") == [tmp_path / "b"]
    for path, words in ((tmp_path / "small", f"{enough - 1:,} bytes"), (tmp_path / "folder", "there is none")):
        with pytest.raises(DeviceFailure, match="--write") as failure:
            measurable_files(path)
        assert words in str(failure.value)
    with pytest.raises(DeviceFailure, match="there is no such file or folder"):
        measurable_files(tmp_path / "nothing")


def test_the_written_file_is_whole_and_goes_away(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    nbytes = (32 << 20) + 12_345
    with written_file(tmp_path, nbytes, lambda done, total: told.append((done, total))) as file:
        data = file.read_bytes()
        assert len(data) == nbytes and file.parent == tmp_path
        assert len(set(data[:4096])) > 200 and told == [(32 << 20, nbytes), (nbytes, nbytes)]
    with pytest.raises(RuntimeError), written_file(tmp_path, 4096):
        raise RuntimeError("while it is measured")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceFailure, match="expected a folder"), written_file(tmp_path / "nothing"):
        pytest.fail("nothing was written")
    free = namedtuple("free", "f_bavail f_frsize")
    monkeypatch.setattr(os, "statvfs", lambda path: free(10, 4096))
    with pytest.raises(DeviceFailure, match="found 40,960 bytes free"), written_file(tmp_path):
        pytest.fail("nothing was written")
    monkeypatch.setattr(os, "statvfs", lambda path: free(1 << 40, 4096))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DeviceFailure, match="No space left"), written_file(tmp_path, 4096):
        pytest.fail("nothing was written")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("threads", [1, 3])
def test_memory_is_read_by_the_engines_own_kernels(threads: int) -> None:
    speed = measure_memory(threads, nbytes=4 << 20)
    assert speed.threads == threads
    assert min(speed.read_bytes_per_s, speed.trunk_bytes_per_s, speed.expert_bytes_per_s) > 0
