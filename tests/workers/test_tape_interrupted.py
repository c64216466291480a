"""Interrupted packs: full and failing disks, kill -9, damaged remains; the next pack goes on and nothing is lost."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from k3ray.workers.tape import pack as pack_module
from k3ray.workers.tape.journal import Journal, JournalFailure
from k3ray.workers.tape.manifest import read_manifest
from k3ray.workers.tape.pack import PackFailure, PackInterrupted, pack, partial_folder
from tests.tapes import ODD_WIDTHS, SMALL_CHUNK, Model, files_of, opened_model, synthetic_model


def fail_after(monkeypatch: pytest.MonkeyPatch, writes: int, number: int) -> None:
    """Let the system's writes fail from one of them on, after a part of the first failing one was taken."""
    real, calls = os.pwrite, 0

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls == writes:
            return real(descriptor, data[:4096], offset)
        if calls > writes:
            raise OSError(number, os.strerror(number))
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_half_way_keeps_what_was_done(
    model: Model, good: dict[str, bytes], tmp_path: Path, number: int
) -> None:
    out = tmp_path / "tape"
    with pytest.MonkeyPatch.context() as patch:
        fail_after(patch, 30, number)
        with pytest.raises(PackInterrupted, match=os.strerror(number)) as caught:
            model.pack(out)
    assert caught.value.exit_code == 1
    assert "run the same command again" in str(caught.value)
    assert not out.exists()
    summary = model.pack(out)
    assert 20 * 4096 < summary.kept_bytes < summary.tape_bytes
    assert files_of(out) == good


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real disk of six megabytes, for those who may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("a file system of a given size can be mounted by root only")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_real_disk_that_fills_up(model: Model, good: dict[str, bytes], small_disk: Path) -> None:
    filler = small_disk / "somebody-else"

    def fill(done: int, total: int) -> None:
        if done > total // 2 and not filler.exists():
            with filler.open("wb") as file, pytest.raises(OSError, match="No space left"):
                while True:
                    file.write(bytes(4096))
                    file.flush()

    with pytest.raises(PackInterrupted, match="No space left on device"):
        pack(model.binding, model.reader, small_disk / "tape", SMALL_CHUNK, threads=1, progress=fill)
    with pytest.raises(PackFailure, match="make room"):
        model.pack(small_disk / "tape")
    filler.unlink()
    assert model.pack(small_disk / "tape").kept_bytes > 0
    assert files_of(small_disk / "tape") == good


KILLED = """
import sys, time
from pathlib import Path
from k3ray.workers.tape import pack as pack_module
from tests.tapes import SMALL_CHUNK, opened_model
pack_module.JOURNAL_EVERY_BYTES = 256 << 10
def progress(done, total):
    if done > total // 2:
        print("half", flush=True)
        time.sleep(60)
with opened_model(Path(sys.argv[1])) as model:
    pack_module.pack(model.binding, model.reader, Path(sys.argv[2]), SMALL_CHUNK, progress=progress)
"""


def test_killed_while_packing_then_again(model: Model, good: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "tape"
    command = [sys.executable, "-c", KILLED, str(model.path), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"half\n"
        with pytest.raises(JournalFailure, match="another process is packing there") as caught:
            model.pack(out)
        assert caught.value.exit_code == 2
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not out.exists()
    summary = model.pack(out)
    assert summary.kept_bytes >= summary.tape_bytes // 2 - (256 << 10)
    assert files_of(out) == good


@pytest.fixture
def half(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pack that was interrupted after its 60th chunk."""
    out = tmp_path / "tape"

    def progress(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(model.binding, model.reader, out, SMALL_CHUNK, threads=1, progress=progress)
    return out


def test_bytes_that_changed_since_are_packed_again(model: Model, good: dict[str, bytes], half: Path) -> None:
    path = partial_folder(half) / "trunk.tape"
    with path.open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff\x00\xff")
    kept = model.pack(half).kept_bytes
    assert kept > len(good["trunk.tape"]) // 3
    assert files_of(half) == good


def test_a_cut_tape_and_a_cut_journal_are_gone_on_with(model: Model, good: dict[str, bytes], half: Path) -> None:
    os.truncate(partial_folder(half) / "trunk.tape", 100_001)
    path = partial_folder(half) / "journal"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:-3])
    assert 0 < model.pack(half).kept_bytes <= 100_001
    assert files_of(half) == good


@pytest.mark.parametrize("keep", [0, 1, 40])
def test_a_journal_without_its_first_line_begins_anew(
    model: Model, good: dict[str, bytes], half: Path, keep: int
) -> None:
    os.truncate(partial_folder(half) / "journal", keep)
    assert model.pack(half).kept_bytes == 0
    assert files_of(half) == good


def test_a_journal_that_lies_is_not_believed(model: Model, good: dict[str, bytes], half: Path) -> None:
    path = partial_folder(half) / "journal"
    first, *lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b"".join(b"%d 00000000\n" % number for number in range(len(lines))))
    assert model.pack(half).kept_bytes == 0
    assert files_of(half) == good


def test_an_unfinished_tape_of_another_model_is_left_alone(model: Model, half: Path, tmp_path: Path) -> None:
    before = files_of(partial_folder(half))
    path = synthetic_model(tmp_path / "other", ODD_WIDTHS)
    with opened_model(path) as other, pytest.raises(JournalFailure, match="unfinished tape of another model"):
        other.pack(half)
    with pytest.raises(JournalFailure, match="another chunk size"):
        model.pack(half, 64 << 10)
    assert files_of(partial_folder(half)) == before


def test_an_interrupt_at_the_rename_is_gone_on_with(
    model: Model, good: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "tape"
    with monkeypatch.context() as patch:
        patch.setattr(pack_module, "write_manifest", lambda *arguments: (_ for _ in ()).throw(OSError(28, "full")))
        with pytest.raises(PackInterrupted):
            model.pack(out)
    summary = model.pack(out)
    assert summary.kept_bytes == summary.tape_bytes
    assert files_of(out) == good


def test_the_journal_holds_only_what_is_on_the_disk(model: Model, tmp_path: Path) -> None:
    model.pack(tmp_path / "tape")
    identity = read_manifest(tmp_path / "tape").identity
    with Journal(tmp_path, identity) as journal:
        assert journal.finished == {}
        journal.append([(3, 0xABC), (1, 0)])
        with pytest.raises(JournalFailure, match="another process"):
            Journal(tmp_path, identity)
    with Journal(tmp_path, identity) as journal:
        assert journal.finished == {3: 0xABC, 1: 0}


def test_a_line_that_was_not_finished_does_not_spoil_the_next_ones(model: Model, tmp_path: Path) -> None:
    model.pack(tmp_path / "tape")
    identity = read_manifest(tmp_path / "tape").identity
    with Journal(tmp_path, identity) as journal:
        journal.append([(1, 7)])
    with (tmp_path / "journal").open("ab") as file:
        file.write(b"2 00000")
    with Journal(tmp_path, identity) as journal:
        assert journal.finished == {1: 7}
        journal.append([(3, 9)])
    with Journal(tmp_path, identity) as journal:
        assert journal.finished == {1: 7, 3: 9}
