"""Packing: the tape holds the shards' bytes, whatever the sharding; interrupted, full, failing disks lose nothing."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from k3ray.workers.checkpoint.tensors import TensorReadError
from k3ray.workers.tape import journal as journal_module
from k3ray.workers.tape.order import full_name
from k3ray.workers.tape.pack import PackFailure, pack
from tests.tapes import ODD_WIDTHS, SMALL_CHUNK, Model, files_of, opened_model, synthetic_model
from tests.workers.test_tensors import plain_bytes


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


@pytest.mark.parametrize(("most", "direct"), [(4096, True), (12_288 + 512, True), (5000, False), (1 << 15, False)])
def test_short_writes_are_gone_on_with(
    model: Model, good: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, direct: bool
) -> None:
    real_open, real_write = os.open, os.pwrite

    def opened(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT and not direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, mode)

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        whole = most - most % 4096 if direct else most  # what arrives of a direct write; of the rest it is not certain
        real_write(descriptor, data[:whole], offset)
        return min(len(data), most)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "pwrite", pwrite)
    model.pack(tmp_path / "tape")
    assert files_of(tmp_path / "tape") == good
