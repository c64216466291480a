"""A checkpoint's own index file, absent, packed or damaged: closed against the headers, or refused."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from k3ray.workers.checkpoint.index import CheckpointError, open_index, open_names
from k3ray.workers.checkpoint.index_build import DuplicateTensor
from k3ray.workers.checkpoint.index_file import IndexFileError
from tests.indexes import INDEX, plain_rows, plain_rows_of, rows, write_index, write_shard


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
