"""The index: names one to one with keys, columns equal to the headers, names alone from an index file."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3ray.workers.checkpoint.index import CheckpointError, open_index, open_names
from k3ray.workers.checkpoint.names import MAX_NUMBER, NameTable, numbers_of
from tests.indexes import INDEX, plain_rows, rows, write_index, write_shard


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
    for line in (b"y.safetensors twelve", b"x.safetensors 13", b"y 1 2", b"\xff 12", b"y " + b"9" * 5000, b""):
        (tmp_path / "shard_sizes.txt").write_bytes(b"x.safetensors 12\n" + line + b"\n")
        with pytest.raises(CheckpointError, match="line 2"):
            open_names(tmp_path)
