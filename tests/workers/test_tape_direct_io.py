"""Direct reads: any range, refused O_DIRECT, short reads, failing disks; the file's bytes or an error."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from k3ray.workers.failure import Failure
from k3ray.workers.tape import direct_io
from k3ray.workers.tape.direct_io import DirectFile, DiskReadFailure, prefaulted, slot_bytes

Preadv = Callable[[int, list[memoryview], int], int]
CONTENT = np.random.default_rng(3).integers(0, 256, 5 * 4096 + 777, dtype=np.uint8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "bytes").write_bytes(CONTENT.tobytes())
    return tmp_path / "bytes"


def patch_preadv(monkeypatch: pytest.MonkeyPatch, change: Callable[[Preadv], Preadv]) -> None:
    """Put something between the reader and the system's preadv."""
    monkeypatch.setattr(os, "preadv", change(os.preadv))


def refuse_open(monkeypatch: pytest.MonkeyPatch, number: int) -> list[int]:
    """Let every open with O_DIRECT fail; returns the flags of each open."""
    flags_seen: list[int] = []
    real = os.open

    def opened(path: Path, flags: int, mode: int = 0o777) -> int:
        flags_seen.append(flags)
        if flags & os.O_DIRECT:
            raise OSError(number, os.strerror(number))
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", opened)
    return flags_seen


def is_direct(descriptor: int) -> bool:
    flags = int(next(line.split()[1] for line in open_info(descriptor) if line.startswith("flags")), 8)
    return bool(flags & os.O_DIRECT)


def open_info(descriptor: int) -> list[str]:
    return Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()


RANGES = [(0, 1), (0, 4096), (1, 4096), (4095, 2), (4096, 8192), (5000, 9999), (0, len(CONTENT)), (20000, 1257)]


@pytest.mark.parametrize(("offset", "nbytes"), RANGES)
def test_any_range_is_the_bytes_of_the_file(path: Path, offset: int, nbytes: int) -> None:
    with DirectFile(path) as file:
        view = file.read(prefaulted(slot_bytes(nbytes)), offset, nbytes)
        assert view.tobytes() == CONTENT[offset : offset + nbytes].tobytes()
        assert file.reads == 1
        assert file.bytes_read >= nbytes


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_disk_that_refuses_to_open_directly_is_read_through_the_cache_and_says_so_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    refuse_open(monkeypatch, number)
    said: list[str] = []
    with DirectFile(path, said.append) as file:
        assert not file.direct
        for offset, nbytes in RANGES:
            view = file.read(prefaulted(slot_bytes(nbytes)), offset, nbytes)
            assert view.tobytes() == CONTENT[offset : offset + nbytes].tobytes()
    assert len(said) == 1
    assert str(path.parent) in said[0]
    assert "O_DIRECT" in said[0]


@pytest.mark.parametrize("refused_from", [1, 2, 3])
def test_a_disk_that_refuses_only_a_read_is_read_through_the_cache(
    path: Path, monkeypatch: pytest.MonkeyPatch, refused_from: int
) -> None:
    calls = 0

    def change(real: Preadv) -> Preadv:
        def read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            nonlocal calls
            calls += 1
            if calls >= refused_from and is_direct(descriptor):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return real(descriptor, buffers, offset)

        return read

    patch_preadv(monkeypatch, change)
    said: list[str] = []
    with DirectFile(path, said.append) as file:
        for offset, nbytes in RANGES:
            view = file.read(prefaulted(slot_bytes(nbytes)), offset, nbytes)
            assert view.tobytes() == CONTENT[offset : offset + nbytes].tobytes()
        assert not file.direct
    assert len(said) == 1


def test_einval_of_a_buffered_read_is_an_error_and_no_endless_loop(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_open(monkeypatch, errno.EINVAL)

    def change(real: Preadv) -> Preadv:
        def read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

        return read

    patch_preadv(monkeypatch, change)
    with pytest.raises(DiskReadFailure, match="EINVAL"):
        DirectFile(path)


@pytest.mark.parametrize(
    ("most", "direct"),  # a direct read ends on a page, or at the file's end
    [(1, False), (100, False), (4096, False), (4096, True), (5000, False), (5000, True), (8192, True)],
)
def test_short_reads_are_gone_on_with(path: Path, monkeypatch: pytest.MonkeyPatch, most: int, direct: bool) -> None:
    if not direct:
        refuse_open(monkeypatch, errno.EINVAL)

    def change(real: Preadv) -> Preadv:
        def read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            return min(real(descriptor, buffers, offset), most)

        return read

    with DirectFile(path) as file:
        direct = direct and file.direct
        patch_preadv(monkeypatch, change)
        for offset, nbytes in RANGES[4:]:
            view = file.read(prefaulted(slot_bytes(nbytes)), offset, nbytes)
            assert view.tobytes() == CONTENT[offset : offset + nbytes].tobytes()
        assert file.direct == direct  # a read that goes on off a page would be refused


def test_large_reads_are_split(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "MAX_READ_BYTES", 4096)
    with DirectFile(path) as file:
        view = file.read(prefaulted(slot_bytes(len(CONTENT))), 0, len(CONTENT))
        assert view.tobytes() == CONTENT.tobytes()
        assert file.reads == 6


def test_a_failing_disk_is_an_error_with_its_place_and_is_not_retried(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def change(real: Preadv) -> Preadv:
        def read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(descriptor, buffers, offset)

        return read

    patch_preadv(monkeypatch, change)
    slot = prefaulted(slot_bytes(4096))
    with DirectFile(path) as file:
        file.read(slot, 0, 4096)
        with pytest.raises(DiskReadFailure, match=rf"{path}.*EIO .* at byte 8192, expected 100 bytes") as caught:
            file.read(slot, 8192, 100)
        assert (caught.value.path, caught.value.offset, caught.value.errno) == (path, 8192, errno.EIO)
        assert isinstance(caught.value, Failure)
        assert calls == 3
        assert file.read(slot, 8192, 100).tobytes() == CONTENT[8192:8292].tobytes()  # the caller may ask again


@pytest.mark.parametrize(("offset", "nbytes"), [(0, len(CONTENT) + 1), (20480, 4096), (4096 * 6, 1), (1 << 40, 10)])
@pytest.mark.parametrize("direct", [True, False])
def test_bytes_past_the_end_are_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch, offset: int, nbytes: int, direct: bool
) -> None:
    if not direct:
        refuse_open(monkeypatch, errno.EINVAL)
    with DirectFile(path) as file, pytest.raises(DiskReadFailure, match="the end of the file after byte"):
        file.read(prefaulted(slot_bytes(nbytes)), offset, nbytes)


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(DiskReadFailure, match="cannot be opened \\(No such file"):
        DirectFile(tmp_path / "absent")


def test_a_file_that_is_dropped_or_closed_leaves_no_descriptor(path: Path) -> None:
    def open_here() -> list[str]:
        links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return [link for link in links if link == str(path)]

    file = DirectFile(path)
    assert len(open_here()) == 1
    del file
    assert not open_here()
    file = DirectFile(path)
    file.close()
    file.close()
    assert not open_here()


def test_an_empty_file_has_nothing_to_probe(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with DirectFile(tmp_path / "empty") as file:
        assert file.file_bytes == 0


def test_a_slot_that_is_too_small_or_off_a_page_is_refused(path: Path) -> None:
    with DirectFile(path) as file:
        with pytest.raises(ValueError, match="need a slot of 8192 bytes"):
            file.read(prefaulted(4096), 4095, 2)
        with pytest.raises(ValueError, match="on a page"):
            file.read(prefaulted(8192)[1:], 0, 10)


@pytest.mark.parametrize("nbytes", [0, 1, 4096, (2 << 20) + 1])
def test_memory_begins_on_a_page_and_is_zero(nbytes: int) -> None:
    memory = prefaulted(nbytes)
    assert memory.shape == (nbytes,)
    assert not memory.any()
    assert nbytes == 0 or memory.ctypes.data % 4096 == 0


def test_tmpfs_is_read_whatever_it_says_about_direct_reads() -> None:
    folder = Path("/dev/shm")  # some kernels refuse O_DIRECT there, others take it
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        pytest.skip("no /dev/shm that can be written to")
    path = folder / f"direct-reads-{os.getpid()}"
    try:
        path.write_bytes(CONTENT.tobytes())
        with DirectFile(path) as file:
            assert file.read(prefaulted(slot_bytes(9999)), 5000, 9999).tobytes() == CONTENT[5000:14999].tobytes()
    finally:
        path.unlink(missing_ok=True)
