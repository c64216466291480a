"""The index: names one to one with keys, columns equal to the headers, closed against the index file, kept once."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import shutil
import stat
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3ray.workers.checkpoint import index as index_module
from k3ray.workers.checkpoint import index_build, index_cache
from k3ray.workers.checkpoint.header_json import HeaderError
from k3ray.workers.checkpoint.index import CheckpointError, TensorIndex, open_index, open_names
from k3ray.workers.checkpoint.index_build import DuplicateTensor
from k3ray.workers.checkpoint.index_file import IndexFileError
from k3ray.workers.checkpoint.names import MAX_NUMBER, NameTable, numbers_of
from k3ray.workers.checkpoint.shard_files import list_shard_files

INDEX = "model.safetensors.index.json"


def write_shard(path: Path, names: list[str]) -> None:
    """A shard of one-byte tensors."""
    header = {n: {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i, n in enumerate(names)}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(len(names)))


def write_index(folder: Path, places: dict[str, str], **metadata: object) -> Path:
    path = folder / INDEX
    path.write_text(json.dumps({"metadata": metadata, "weight_map": places}))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two shards and its index file."""
    path = tmp_path / "model"
    path.mkdir()
    write_shard(path / "a.safetensors", ["layers.0.w", "layers.1.w", "top"])
    write_shard(path / "b.safetensors", ["layers.2.w", "layers.3.e.7.w"])
    places = dict.fromkeys(("layers.0.w", "layers.1.w", "top"), "a.safetensors")
    write_index(path, places | dict.fromkeys(("layers.2.w", "layers.3.e.7.w"), "b.safetensors"), total_size=5)
    return path


@pytest.fixture
def cache(tmp_path: Path) -> list[Path]:
    return [tmp_path / "cache" / "index"]


def rows(index: TensorIndex) -> dict[str, tuple[str, str, list[int], int]]:
    """Every tensor of an index as plain values."""
    entries = [index.entry(row) for row in range(len(index))]
    return {e.name: (e.path.name, e.dtype, list(e.shape), e.offset) for e in entries}


def plain_rows(folder: Path) -> dict[str, tuple[str, str, list[int], int]]:
    """The same, read with plain JSON."""
    plain = {}
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":
                plain[name] = (path.name, entry["dtype"], entry["shape"], 8 + length + entry["data_offsets"][0])
    return plain


@pytest.mark.parametrize("golden", ["k3a_dir", "k3b_dir"])
def test_golden_index_equals_the_headers(golden: str, request: pytest.FixtureRequest, cache: list[Path]) -> None:
    folder = request.getfixturevalue(golden)
    built, kept = open_index(folder, cache), open_index(folder, cache)
    expected = plain_rows(folder)
    assert len(built) == len(expected)
    assert rows(built) == rows(kept) == expected
    for name, (shard, _, _, offset) in expected.items():
        entry = kept.find(name)
        assert entry is not None
        assert (entry.path.name, entry.offset) == (shard, offset)
    assert sum(kept.templates().values()) == len(expected)
    assert kept.total_bytes() == kept.stated_bytes == sum(kept.entry(row).nbytes for row in range(len(kept)))


def test_what_is_not_there_is_not_found(folder: Path, cache: list[Path]) -> None:
    index = open_index(folder, cache)
    for name in (
        "",
        "layers",
        "layers.4.w",
        "layers.00.w",
        "layers.3.e.8.w",
        "layers.3.w",
        "layers.#.w",
        "top.1",
        "zz",
    ):
        assert index.find(name) is None, name
    assert index.rows_of("layers.#.w") == slice(0, 3)
    assert index.rows_of("none") == slice(0, 0)


def test_bytes_per_tensor(k3a_dir: Path, cache: list[Path]) -> None:
    index = open_index(k3a_dir, cache)
    assert index.columns.nbytes / len(index) == 24
    path = next(cache[0].glob("*.k3index"))
    assert path.stat().st_size - 24 * len(index) < 16_384  # templates, kinds and shards, whatever the tensors


def test_an_opened_index_allocates_nothing_per_tensor(tmp_path: Path, cache: list[Path]) -> None:
    names = [f"layers.{layer}.experts.{expert}.w" for layer in range(20) for expert in range(1000)]
    write_shard(tmp_path / "a.safetensors", names)
    assert len(open_index(tmp_path, cache)) == 20_000
    tracemalloc.start()
    index = open_index(tmp_path, cache)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(index) == 20_000
    assert held < 40_000  # two bytes a tensor; the columns are the file itself, mapped
    assert not index.columns.keys.flags.writeable


COMPONENTS = st.sampled_from(
    ["0", "1", "7", "10", "007", "00", "#", "", "a", "é", "-1", "1048574", "1048575", "9999999", "10000000", "٣", "1e5"]
) | st.text(max_size=4)
NAMES = st.lists(COMPONENTS, min_size=1, max_size=6).map(".".join)


@settings(max_examples=300, deadline=None)
@given(names=st.lists(NAMES, max_size=12, unique=True), first=st.lists(NAMES, max_size=3))
def test_names_and_keys_are_one_to_one(names: list[str], first: list[str]) -> None:
    table = NameTable()
    table.add(pa.array(first, type=pa.large_string()))
    keys = table.add(pa.array(["cut off", *names], type=pa.large_string()).slice(1)).tolist()
    assert [table.name(key) for key in keys] == names
    assert len(set(keys)) == len(names)
    assert [table.key(name) for name in names] == keys
    assert [NameTable(table.templates).key(name) for name in names] == keys


def test_names_share_templates() -> None:
    table = NameTable()
    keys = table.add(pa.array(["a.7.b.12.c.3", "a.0.b.895.c.3", "a.x"], type=pa.large_string()))
    assert table.templates == ["a.#.b.#.c.3", "a.x"]
    assert [column.tolist() for column in numbers_of(keys)] == [[7, 0, -1], [12, 895, -1]]
    assert table.key(f"a.{MAX_NUMBER}.b.1.c.3") is None


def test_a_folder_without_an_index_file(folder: Path, cache: list[Path]) -> None:
    with_file = open_index(folder, cache)
    (folder / INDEX).unlink()
    index = open_index(folder, cache)
    assert rows(index) == rows(with_file) == plain_rows(folder)
    assert index.fingerprint == with_file.fingerprint
    assert (with_file.index_file, with_file.stated_bytes, index.index_file) == (INDEX, 5, None)


def test_a_packed_index_file(folder: Path, cache: list[Path]) -> None:
    expected = plain_rows(folder)
    packed = folder / f"{INDEX}.gz"
    packed.write_bytes(gzip.compress((folder / INDEX).read_bytes()))
    assert rows(open_index(folder, cache)) == expected  # both, with the same content
    (folder / INDEX).unlink()
    assert rows(open_index(folder, cache)) == expected
    write_index(folder, {})
    with pytest.raises(IndexFileError, match="another content than in"):
        open_index(folder, cache)


def test_other_files_are_left_alone(folder: Path, cache: list[Path]) -> None:
    for name in ("._a.safetensors", "a.safetensors.part", "notes.txt"):
        (folder / name).write_bytes(b"\0\1")
    (folder / "old.safetensors").mkdir()
    assert rows(open_index(folder, cache)) == plain_rows_of(folder, ["a.safetensors", "b.safetensors"])


def plain_rows_of(folder: Path, names: list[str]) -> dict[str, Any]:
    target = folder.parent / "plain"
    target.mkdir()
    for name in names:
        shutil.copy(folder / name, target)
    return plain_rows(target)


def changed_index(folder: Path, **changes: str | None) -> None:
    document = json.loads((folder / INDEX).read_bytes())
    for name, shard in changes.items():
        if shard is None:
            del document["weight_map"][name]
        else:
            document["weight_map"][name] = shard
    (folder / INDEX).write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ghost": "b.safetensors"}, ["1 difference", '"ghost" is not in b.safetensors, where the index places it']),
        ({"top": None}, ["1 difference", '"top" is in a.safetensors and not in the index']),
        ({"top": "b.safetensors"}, ["1 difference", '"top" is in a.safetensors, the index says b.safetensors']),
        ({"top": "b.safetensors", "layers.2.w": None, "x": "a.safetensors"}, ["3 differences"]),
        ({"top": "c.safetensors"}, ["2 of its 3 shards; missing: c.safetensors"]),
        ({"top": "../a.safetensors"}, ['shard name "../a.safetensors"']),
        ({"top": "/etc/passwd"}, ['shard name "/etc/passwd"']),
        ({"top": ""}, ['shard name ""']),
        ({"top": "a\x1b[2J.safetensors"}, ['shard name "a\\u001b[2J.safetensors"']),
        ({"top": "a\nb.safetensors"}, ['shard name "a\\nb.safetensors"']),
    ],
)
def test_an_index_file_that_says_something_else(
    folder: Path, cache: list[Path], changes: dict[str, str | None], words: list[str]
) -> None:
    changed_index(folder, **changes)
    with pytest.raises((IndexFileError, CheckpointError)) as caught:
        open_index(folder, cache)
    assert str(folder / INDEX) in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_many_differences_are_counted_and_the_first_listed(folder: Path, cache: list[Path]) -> None:
    changed_index(folder, **{f"ghost.{number}": "a.safetensors" for number in range(50)})
    with pytest.raises(IndexFileError) as caught:
        open_index(folder, cache)
    assert "50 differences" in str(caught.value)
    assert "and 30 more" in str(caught.value)
    assert str(caught.value).count("ghost.") == 20


def test_a_shard_that_the_index_file_does_not_name(folder: Path, cache: list[Path]) -> None:
    write_shard(folder / "c.safetensors", ["extra"])
    with pytest.raises(IndexFileError, match=r'"extra" is in c\.safetensors and not in the index'):
        open_index(folder, cache)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"metadata": {}}',
        '{"weight_map": 3}', '{"weight_map": {"a": {"b": "c"}}}', '{"weight_map": {"top" "a.safetensors"}}',
        '{"weight_map": {"\\ud800": "a.safetensors"}}',
        '{"weight_map": {"top": "a.safetensors", "top": "a.safetensors"}}', '{"weight_map":' + "[" * 100_000,
        '{"weight_map": {"top": "a.safetensors",, "x": "a.safetensors"}}', '{"weight_map": {}}',
    ],
)  # fmt: skip
def test_index_files_that_are_none(folder: Path, cache: list[Path], text: str) -> None:
    (folder / INDEX).write_text(text)
    with pytest.raises(IndexFileError):
        open_index(folder, cache)


def test_a_tensor_twice_in_the_index_file(folder: Path, cache: list[Path]) -> None:
    text = (folder / INDEX).read_text().replace('"top":', '"top": "b.safetensors", "top":')
    (folder / INDEX).write_text(text)
    with pytest.raises(IndexFileError, match='"top" is more than once in the index'):
        open_index(folder, cache)
    with pytest.raises(IndexFileError, match='the tensor "top" more than once'):
        open_names(folder)


def test_index_files_in_any_writing(folder: Path, cache: list[Path]) -> None:
    expected = plain_rows(folder)
    document = json.loads((folder / INDEX).read_bytes())
    for text in (json.dumps(document, indent=2), json.dumps(document).replace('"top"', '"\\u0074op"')):
        (folder / INDEX).write_text(text)
        assert rows(open_index(folder, cache)) == expected
    for broken in (json.dumps(document)[:-9], json.dumps(document)[:400].rstrip("}")):
        (folder / INDEX).write_text(broken)
        with pytest.raises(IndexFileError):
            open_index(folder, cache)


def test_a_folder_that_may_be_listed_and_not_entered(
    folder: Path, cache: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.stat

    def stat_of(path: Path, **options: Any) -> os.stat_result:
        if path.name == INDEX:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, **options)

    monkeypatch.setattr(Path, "stat", stat_of)
    with pytest.raises(IndexFileError, match="Permission denied"):
        open_index(folder, cache)


def test_damaged_gzip(folder: Path, cache: list[Path]) -> None:
    data = gzip.compress((folder / INDEX).read_bytes())
    (folder / INDEX).unlink()
    for bad in (data[:-20], data[:20] + b"\0" + data[21:], b"", b"xx"):
        (folder / f"{INDEX}.gz").write_bytes(bad)
        with pytest.raises(IndexFileError):
            open_index(folder, cache)


def test_one_name_in_two_shards(folder: Path, cache: list[Path]) -> None:
    (folder / INDEX).unlink()
    write_shard(folder / "c.safetensors", ["layers.3.e.7.w"])
    with pytest.raises(DuplicateTensor, match=r'"layers\.3\.e\.7\.w": found in .*b\.safetensors and in c\.safetensors'):
        open_index(folder, cache)


def test_folders_that_are_no_checkpoint(tmp_path: Path, folder: Path, cache: list[Path]) -> None:
    with pytest.raises(CheckpointError, match="no folder that can be read"):
        open_index(tmp_path / "none", cache)
    with pytest.raises(CheckpointError, match="no folder that can be read"):
        open_index(folder / INDEX, cache)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no \.safetensors file, expected a checkpoint's shards"):
        open_index(tmp_path / "empty", cache)
    (folder / "b.safetensors").unlink()
    (folder / "b.safetensors").symlink_to("gone")
    with pytest.raises(CheckpointError, match=r"b\.safetensors: found a file that cannot be looked at"):
        open_index(folder, cache)


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


def test_names_alone_from_the_released_index(shared_data: Path) -> None:
    index = open_names(shared_data / "k3-release")
    assert len(index) == 497_220
    assert index.stated_bytes == 1_560_860_324_864
    assert len(index.shards) == 96
    assert sum(shard.file_bytes for shard in index.shards) == 1_560_936_091_448
    with gzip.open(shared_data / "k3-release" / f"{INDEX}.gz") as file:
        places = json.load(file)["weight_map"]
    for name in list(places)[:: len(places) // 500]:
        row = index.row(name)
        assert row is not None
        assert index.name(row) == name
        assert index.path(row).name == places[name]
    assert index.row("language_model.model.layers.93.input_layernorm.weight") is None


def test_names_alone_need_an_index_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no model\.safetensors\.index\.json"):
        open_names(tmp_path)
    write_index(tmp_path, {})
    with pytest.raises(CheckpointError, match="an index without a tensor"):
        open_names(tmp_path)
    with pytest.raises(CheckpointError, match=r"no \.safetensors file, only an index of them"):
        open_index(tmp_path, [])


def test_a_published_size_list_that_is_none(tmp_path: Path) -> None:
    write_index(tmp_path, {"a.1.b": "x.safetensors"})
    (tmp_path / "shard_sizes.txt").write_text("x.safetensors 12\n")
    assert open_names(tmp_path).shards[0].file_bytes == 12
    (tmp_path / "shard_sizes.txt").write_text("x.safetensors 12\nx.safetensors twelve\n")
    with pytest.raises(CheckpointError, match="line 2"):
        open_names(tmp_path)
