"""A_log: every layout that is understood gives one value a head; what is no padding is refused when it is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from k3ray.workers.checkpoint.a_log import read_a_log
from k3ray.workers.checkpoint.binding import bind
from k3ray.workers.checkpoint.index import open_index
from k3ray.workers.checkpoint.tensors import TensorReader, TensorReadError
from k3ray.workers.model.config import read_config
from tests.zero_shards import RELEASED, Table, read_table, write


@pytest.fixture(scope="module")
def golden(k3b_dir: Path) -> Table:
    return read_table(k3b_dir)


@pytest.mark.parametrize("shape", [[64], [3], [70], [1, 1, 3, 1]])
def test_layouts_of_a_log(tmp_path: Path, k3b_dir: Path, golden: Table, shape: list[int]) -> None:
    name = f"{RELEASED}layers.0.self_attn.A_log"
    index = open_index(write(tmp_path, golden | {name: ("F32", shape)}), [])
    assert bind(read_config(k3b_dir), index).num_bound == 1002
    path = tmp_path / "a.safetensors"
    entry = index.find(name)
    assert entry is not None
    values = np.array([0.25, -1.5, 3.0], dtype=np.float32)
    data = bytearray(path.read_bytes())
    data[entry.offset : entry.offset + 12] = values.tobytes()
    path.write_bytes(data)
    found = read_a_log(TensorReader(open_index(tmp_path, [])), name, 3)
    assert found.tobytes() == values.tobytes()
    assert found.shape == (3,)


@pytest.mark.parametrize("value", [1.0, -1e-45, float("nan")])
@pytest.mark.parametrize("place", [3, 63])
def test_a_tail_that_is_not_zero_is_refused(tmp_path: Path, golden: Table, value: float, place: int) -> None:
    name = f"{RELEASED}layers.0.self_attn.A_log"
    entry = open_index(write(tmp_path, golden), []).find(name)
    assert entry is not None
    data = bytearray((tmp_path / "a.safetensors").read_bytes())
    data[entry.offset + 4 * place : entry.offset + 4 * place + 4] = np.float32(value).tobytes()
    (tmp_path / "a.safetensors").write_bytes(data)
    with pytest.raises(TensorReadError, match=rf"at entry {place} \(1 entries after the 3 heads are not zero\)"):
        read_a_log(TensorReader(open_index(tmp_path, [])), name, 3)


def test_too_short_an_a_log_is_refused_when_read(tmp_path: Path, golden: Table) -> None:
    name = f"{RELEASED}layers.0.self_attn.A_log"
    reader = TensorReader(open_index(write(tmp_path, golden | {name: ("F32", [2])}), []))
    with pytest.raises(TensorReadError, match=r"found F32 \[2\], expected F32 \[3\], or longer with zeros"):
        read_a_log(reader, name, 3)


def test_the_golden_a_log_is_per_head(k3b_dir: Path) -> None:
    name = f"{RELEASED}layers.4.self_attn.A_log"
    reader = TensorReader(open_index(k3b_dir, []))
    stored = reader.read(name)
    assert stored.shape == (64,)
    assert not stored[3:].any()
    assert read_a_log(reader, name, 3).tobytes() == stored[:3].tobytes()
    with pytest.raises(TensorReadError):
        read_a_log(reader, name, 2)  # the third head's value is no padding
