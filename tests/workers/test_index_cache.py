"""The index is made once and kept: damaged, stale or unwritable caches never change what is read."""

from __future__ import annotations

import multiprocessing
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from k3ray.workers.checkpoint import index as index_module
from k3ray.workers.checkpoint import index_build, index_cache
from k3ray.workers.checkpoint.header_json import HeaderError
from k3ray.workers.checkpoint.index import CheckpointError, TensorIndex, open_index
from k3ray.workers.checkpoint.shard_files import list_shard_files
from tests.indexes import INDEX, plain_rows, rows, write_shard


def test_a_changed_shard_is_read_again(folder: Path, cache: list[Path]) -> None:
    (folder / INDEX).unlink()
    before = open_index(folder, cache)
    old = (folder / "b.safetensors").stat()
    write_shard(folder / "new", ["layers.9.w", "layers.3.e.7.w"])  # the same size
    os.utime(folder / "new", ns=(old.st_atime_ns, old.st_mtime_ns))
    (folder / "new").rename(folder / "b.safetensors")
    assert (folder / "b.safetensors").stat().st_size == old.st_size
    after = open_index(folder, cache)
    assert after.find("layers.9.w") is not None
    assert after.find("layers.2.w") is None
    assert before.find("layers.2.w") is not None  # the old one stays mapped where it is in use
    assert after.fingerprint != before.fingerprint
    assert len(list(cache[0].glob("*.k3index"))) == 1


def test_a_shard_that_became_wrong_is_refused(folder: Path, cache: list[Path]) -> None:
    open_index(folder, cache)
    with (folder / "a.safetensors").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(HeaderError, match="bytes that no tensor owns"):
        open_index(folder, cache)


def test_it_is_made_once(folder: Path, cache: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        index_module, "build_index", lambda files, partial: calls.append(1) or index_build.build_index(files)
    )
    first = open_index(folder, cache)
    for _ in range(3):
        assert rows(open_index(folder, cache)) == rows(first)
    assert len(calls) == 1


@pytest.mark.parametrize("place", [0, 8, 16, 24, 40, 200, -1, -25, -60])
def test_a_damaged_cache_is_made_again(
    folder: Path, cache: list[Path], monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    expected = rows(open_index(folder, cache))
    path = next(cache[0].glob("*.k3index"))
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.unlink()  # not written in place: an index in use is mapped
    path.write_bytes(data)
    calls = []
    monkeypatch.setattr(
        index_module, "build_index", lambda files, partial: calls.append(1) or index_build.build_index(files)
    )
    assert rows(open_index(folder, cache)) == expected
    assert len(calls) == 1
    assert rows(open_index(folder, cache)) == expected
    assert len(calls) == 1


@pytest.mark.parametrize("size", [0, 1, 31, 40, -1])
def test_a_cut_cache_is_made_again(folder: Path, cache: list[Path], size: int) -> None:
    expected = rows(open_index(folder, cache))
    path = next(cache[0].glob("*.k3index"))
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:size])
    assert rows(open_index(folder, cache)) == expected
    assert path.read_bytes() == data


def test_the_cache_of_another_state_is_not_taken(folder: Path, cache: list[Path]) -> None:
    open_index(folder, cache)
    path = next(cache[0].glob("*.k3index"))
    files = list_shard_files(folder)
    assert index_cache.load(path, folder, files.stamp) is not None
    assert index_cache.load(path, folder, "0" * 32) is None


def test_where_nothing_can_be_written_the_index_is_in_memory(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    expected = plain_rows(folder)
    assert rows(open_index(folder, [tmp_path / "file" / "k3ray" / "index"])) == expected
    assert rows(open_index(folder, [])) == expected


def test_the_second_place_is_taken_when_the_first_cannot_be_used(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    open_shared = tmp_path / "shared" / "index"
    open_shared.mkdir(parents=True)
    open_shared.chmod(0o777)  # anyone could plant an index there
    places = [tmp_path / "file" / "index", open_shared, tmp_path / "own" / "index"]
    assert index_cache.usable_directory(places) == places[2]
    open_index(folder, places)
    assert [path.suffix for path in sorted(places[2].iterdir())].count(".k3index") == 1
    assert stat.S_IMODE(places[2].stat().st_mode) == 0o700
    assert not list(open_shared.iterdir())


def test_a_disk_that_is_full(folder: Path, cache: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(index_cache.os, "fdopen", refuse)
    assert rows(open_index(folder, cache)) == plain_rows(folder)
    assert not [path for path in cache[0].iterdir() if path.suffix != ".lock"]


def test_a_disk_without_locks(folder: Path, cache: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    class NoLock:
        def __init__(self, *_: object, **__: object) -> None:
            raise OSError(37, "No locks available")

    monkeypatch.setattr(index_module, "FileLock", NoLock)
    assert rows(open_index(folder, cache)) == plain_rows(folder)


def test_files_that_change_while_they_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build_and_touch(files: Any, partial: bool) -> TensorIndex:
        os.utime(folder / "a.safetensors", ns=(1, 1))
        return index_build.build_index(files)

    monkeypatch.setattr(index_module, "build_index", build_and_touch)
    with pytest.raises(CheckpointError, match="files that changed while their headers were read"):
        open_index(folder, [])


def open_and_count(folder: Path, cache: list[Path]) -> tuple[int, str]:
    index = open_index(folder, cache)
    return len(index), index.fingerprint


def test_processes_open_it_at_once(k3b_dir: Path, cache: list[Path]) -> None:
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        answers = pool.starmap(open_and_count, [(k3b_dir, cache)] * 6)
    assert set(answers) == {open_and_count(k3b_dir, [])}
    assert len(answers) == 6
    assert len(list(cache[0].glob("*.k3index"))) == 1
