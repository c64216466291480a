"""The census reproduces the table and the published bytes of the released checkpoint, and the goldens' own figures."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from k3ray.workers.checkpoint.binding import BindError
from k3ray.workers.checkpoint.census import read_census
from k3ray.workers.checkpoint.index import CheckpointError


def test_the_released_table(shared_data: Path) -> None:
    census = read_census(shared_data / "k3-release")
    assert census.objects == {
        "A_log": 69,
        "dt_bias": 69,
        "router weight": 92,
        "router correction bias": 92,
        "expert weight_packed": 247_296,
        "expert weight_scale": 247_296,
        "AttnRes projections": 187,
        "AttnRes norms": 187,
        "vision": 165,
        "projector": 3,
    }
    assert (census.num_tensors, census.num_bound, census.num_left) == (497_220, 497_052, 168)
    assert (census.num_shards, census.file_bytes) == (96, 1_560_936_091_448)
    assert census.stated_bytes == 1_560_860_324_864
    assert (census.num_layers, census.num_kda_layers, census.num_mla_layers, census.num_moe_layers) == (93, 69, 24, 92)
    assert (census.num_experts, census.expert_bytes) == (82_432, 17_547_264)
    assert census.bytes_by_group["routed experts"] == 82_432 * 17_547_264
    assert round(census.bytes_by_group["routed experts"] / census.stated_bytes * 100, 2) == 92.67
    assert census.bytes_by_group["embedding"] == census.bytes_by_group["head"] == 2_348_810_240
    assert round(census.trunk_bytes / 1e9, 2) == 108.81
    assert round(census.expert_bytes_per_token / 1e9, 2) == 25.83
    assert sum(census.bytes_by_group.values()) == census.bound_bytes
    assert census.tensor_bytes is None
    assert census.left_bytes is None
    assert not census.shapes_checked
    assert any("Only names were checked" in line for line in census.observations)


@pytest.mark.parametrize("fixture", ["k3a_dir", "k3b_dir"])
def test_a_golden_closes_to_the_byte(fixture: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(fixture)
    census = read_census(folder)
    stated = json.loads((folder / "model.safetensors.index.json").read_bytes())
    assert census.tensor_bytes == census.stated_bytes == stated["metadata"]["total_size"]
    assert census.num_tensors == len(stated["weight_map"])
    assert census.left_bytes is not None
    assert census.bound_bytes + census.left_bytes == census.tensor_bytes
    assert sum(census.bytes_by_group.values()) == census.bound_bytes
    assert census.file_bytes == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert census.shapes_checked
    assert any("A_log is stored" in line for line in census.observations)
    json.dumps(dataclasses.asdict(census))


def test_golden_figures(k3b_dir: Path) -> None:
    census = read_census(k3b_dir)
    assert census.prefix == "language_model.model."
    assert census.objects["A_log"] == census.objects["dt_bias"] == 6
    assert census.objects["expert weight_packed"] == census.objects["expert weight_scale"] == 8 * 16 * 3
    assert census.objects["AttnRes norms"] == 9 * 2 + 1
    assert census.left == {"vision": 15, "projector": 3}
    assert census.expert_bytes == 2 * (32 * 48 + 32 * 3) + 96 * 16 + 96
    assert census.trunk_bytes == census.bound_bytes - 128 * census.expert_bytes - 2 * 163_840 - 3 * 320


def test_a_total_that_is_not_the_shards(tmp_path: Path, k3b_dir: Path) -> None:
    for path in k3b_dir.iterdir():
        shutil.copy(path, tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("5225600", "5225601"))
    assert any(
        "states 5225601 bytes of tensors, the shards hold 5225600" in o for o in read_census(tmp_path).observations
    )


def test_part_of_a_download_is_no_census_of_names(tmp_path: Path, k3b_dir: Path) -> None:
    for name in ("config.json", "model.safetensors.index.json", "model-00002-of-000005.safetensors"):
        shutil.copy(k3b_dir / name, tmp_path)
    with pytest.raises(CheckpointError, match=r"1 of its 5 shards; missing: model-00001-of-000005\.safetensors"):
        read_census(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(BindError):
        read_census(tmp_path)
