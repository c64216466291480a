"""Packing: the tape holds the shards' bytes, whatever the sharding; interrupted, full, failing disks lose nothing."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from k3ray.workers.checkpoint.tensors import TensorReadError
from k3ray.workers.tape import journal as journal_module
from k3ray.workers.tape import pack as pack_module
from k3ray.workers.tape.journal import Journal, JournalFailure
from k3ray.workers.tape.manifest import read_manifest
from k3ray.workers.tape.order import full_name
from k3ray.workers.tape.pack import PackFailure, PackInterrupted, pack, partial_folder
from tests.tapes import ODD_WIDTHS, SMALL_CHUNK, Model, opened_model, synthetic_model
from tests.workers.test_tensors import plain_bytes


@pytest.fixture(scope="module")
def model(k3b_dir: Path) -> Iterator[Model]:
    with opened_model(k3b_dir) as found:
        yield found


@pytest.fixture(scope="module")
def good(model: Model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of an undisturbed pack."""
    out = tmp_path_factory.mktemp("good") / "tape"
    model.pack(out)
    return files_of(out)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def check_against_plain_slices(model: Model, out: Path, chunk_bytes: int) -> None:
    """Every matrix on the tape is what a plain slice of the shard's file holds."""
    model.pack(out, chunk_bytes)
    tape, plain = (out / "trunk.tape").read_bytes(), plain_bytes(model.path)
    opened = model.open(out)
    opened.file.close()
    layout = opened.layout
    found = [bytearray() for _ in layout.tensors]
    covered = bytearray(len(tape))
    for chunk in layout.chunks:
        for segment in chunk.segments:
            begin = chunk.offset + segment.offset
            end = begin + segment.rows * layout.tensors[segment.tensor].row_bytes
            found[segment.tensor] += tape[begin:end]
            covered[begin:end] = bytes([1]) * (end - begin)
    for tensor, data in zip(layout.tensors, found, strict=True):
        assert bytes(data) == plain[full_name(model.binding, tensor)][2]
    assert not any(byte for byte, used in zip(tape, covered, strict=True) if not used)


@pytest.mark.parametrize("chunk_bytes", [16 << 10, 68 << 10, 8 << 20])
def test_a_golden_checkpoint_that_spreads_its_layers_over_shards(
    model: Model, tmp_path: Path, chunk_bytes: int
) -> None:
    check_against_plain_slices(model, tmp_path / "tape", chunk_bytes)


def test_odd_widths_and_every_shard_layout_make_one_tape(tmp_path: Path) -> None:
    made = []
    for sharding, shards in (("release", 1), ("packed", 2), ("packed", 5)):
        spec = replace(ODD_WIDTHS, sharding=sharding, packed_shards=shards)
        path = synthetic_model(tmp_path / f"{sharding}{shards}", spec)
        with opened_model(path) as odd:
            check_against_plain_slices(odd, tmp_path / f"tape-{sharding}{shards}", 16 << 10)
        made.append((tmp_path / f"tape-{sharding}{shards}" / "trunk.tape").read_bytes())
    assert made[0] == made[1] == made[2]


def test_progress_reaches_the_end_and_nothing_is_left_beside(model: Model, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    summary = pack(
        model.binding, model.reader, tmp_path / "tape", SMALL_CHUNK, progress=lambda *place: seen.append(place)
    )
    assert seen[-1] == (summary.tape_bytes, summary.tape_bytes)
    assert seen == sorted(seen) and len(seen) == summary.num_chunks
    assert [path.name for path in tmp_path.iterdir()] == ["tape"]
    assert sorted(files_of(tmp_path / "tape")) == ["manifest.json", "trunk.tape"]
    assert summary.kept_bytes == 0


def test_an_empty_folder_is_filled_and_anything_else_is_refused(model: Model, tmp_path: Path) -> None:
    (tmp_path / "tape").mkdir()
    model.pack(tmp_path / "tape")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("tape", "file", "link"):
        with pytest.raises(PackFailure, match="exists already") as caught:
            model.pack(tmp_path / name)
        assert caught.value.exit_code == 2
    with pytest.raises(PackFailure, match=f"the folder {tmp_path}/absent does not exist"):
        model.pack(tmp_path / "absent" / "tape")


def test_a_disk_without_room_is_refused_before_anything_is_written(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 4_000_000, 4_000_000)
    )
    with pytest.raises(PackFailure, match=r"0\.004 GB free, the tape needs 0\.005 GB more.*nothing was written"):
        model.pack(tmp_path / "tape")
    assert not list(tmp_path.iterdir())


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


def test_a_shard_cut_while_it_is_packed_is_named(tmp_path: Path, k3b_dir: Path) -> None:
    path = shutil.copytree(k3b_dir, tmp_path / "model")
    with opened_model(path) as model:
        os.truncate(path / "model-00003-of-000005.safetensors", 1_000_000)
        with pytest.raises(TensorReadError, match=r"model-00003-of-000005\.safetensors"):
            model.pack(tmp_path / "tape")
    assert not (tmp_path / "tape").exists()


def test_a_disk_without_direct_writes_and_locks(
    model: Model, good: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open, real_write, refused = os.open, os.pwrite, 0

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        nonlocal refused
        if descriptor in direct:
            refused += 1
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_write(descriptor, data, offset)

    def opened(path: Path, flags: int, mode: int = 0o777) -> int:
        descriptor = real_open(path, flags, mode)
        if flags & os.O_DIRECT and flags & os.O_RDWR:
            direct.add(descriptor)
        return descriptor

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    direct: set[int] = set()
    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(journal_module.fcntl, "flock", flock)
    said: list[str] = []
    pack(model.binding, model.reader, tmp_path / "tape", SMALL_CHUNK, threads=3, say=said.append)
    assert 1 <= refused <= 3
    assert len(said) == 1 and "O_DIRECT" in said[0]
    assert files_of(tmp_path / "tape") == good


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
