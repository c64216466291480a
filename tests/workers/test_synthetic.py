"""The synthetic checkpoint writer against the golden checkpoints' layout, the release's sizes, and its own promises."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3ray.workers.checkpoint.safetensors_file import PlannedTensor, cut_by_bytes, encode_header, in_file_order
from k3ray.workers.checkpoint.synthetic import plan_checkpoint, write_checkpoint
from k3ray.workers.checkpoint.synthetic_spec import SyntheticSpec, encode_config, released_spec
from k3ray.workers.checkpoint.synthetic_values import tensor_blocks
from k3ray.workers.model.config import read_config

SMALL = SyntheticSpec()
K3B = SyntheticSpec(
    num_hidden_layers=9,
    hidden_size=160,
    vocab_size=512,
    intermediate_size=352,
    attn_res_block_size=4,
    kda_num_heads=3,
    kda_head_dim=64,
    num_attention_heads=5,
    q_lora_rank=56,
    kv_lora_rank=40,
    qk_nope_head_dim=24,
    qk_rope_head_dim=16,
    v_head_dim=32,
    num_experts=16,
    num_experts_per_token=4,
    routed_expert_hidden_size=96,
    moe_intermediate_size=32,
)
ITEM = {"F32": 4, "BF16": 2, "U8": 1}
Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def read_shard(path: Path) -> Tensors:
    """A shard read as the format says, independently of the writer, with every rule of the format checked."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    body = data[8 + length :]
    tensors: Tensors = {}
    end = 0
    for name, entry in header.items():
        low, high = entry["data_offsets"]
        assert low == end and high - low == int(np.prod(entry["shape"])) * ITEM[entry["dtype"]]
        assert (8 + length + low) % ITEM[entry["dtype"]] == 0
        tensors[name] = entry["dtype"], tuple(entry["shape"]), body[low:high]
        end = high
    assert end == len(body)
    return tensors


def read_all(folder: Path) -> Tensors:
    tensors: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= read_shard(path)
    return tensors


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def small_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synthetic") / "small"
    write_checkpoint(folder, SMALL, seed=1)
    return folder


# --- the format, against what others made -------------------------------------------------------------------------


@pytest.mark.parametrize("sharding", ["release", "packed"])
def test_same_tensors_as_the_golden_of_these_widths(tmp_path: Path, k3b_dir: Path, sharding: Any) -> None:
    write_checkpoint(tmp_path / "m", replace(K3B, sharding=sharding), seed=3)
    ours = {name: tensor[:2] for name, tensor in read_all(tmp_path / "m").items()}
    golden = {name: tensor[:2] for name, tensor in _read_golden(k3b_dir).items() if name.startswith("language_model.")}
    assert ours == golden


def _read_golden(folder: Path) -> Tensors:
    """The golden's headers, which carry __metadata__, without the data."""
    tensors: Tensors = {}
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        del header["__metadata__"]
        tensors |= {name: (entry["dtype"], tuple(entry["shape"]), b"") for name, entry in header.items()}
    return tensors


def test_config_reads_as_the_golden_of_these_widths(tmp_path: Path, k3b_dir: Path) -> None:
    (tmp_path / "config.json").write_text(encode_config(K3B))
    assert read_config(tmp_path) == read_config(k3b_dir)


def test_other_files_read_as_the_golden_of_these_widths(tmp_path: Path, k3b_dir: Path) -> None:
    write_checkpoint(tmp_path / "m", K3B, seed=3)
    for name in ("generation_config.json", "tokenizer_config.json"):
        ours, golden = (json.loads((folder / name).read_text()) for folder in (tmp_path / "m", k3b_dir))
        assert {key: golden[key] for key in ours} == ours
    ours_ranks, golden_ranks = (
        (folder / "tiktoken.model").read_text().split("\n") for folder in (tmp_path / "m", k3b_dir)
    )
    assert len(ours_ranks) == len(golden_ranks) and ours_ranks[:256] == golden_ranks[:256]


def test_released_shards_have_the_published_sizes(tmp_path: Path, shared_data: Path) -> None:
    """To the byte: names, shapes, dtypes, order of the keys' text and padding of the header all enter."""
    lines = (shared_data / "k3-release" / "shard_sizes.txt").read_text().split("\n")
    published = {int(name[6:11]): int(size) for name, size in (line.split() for line in lines if line)}
    spec = released_spec(5)
    (tmp_path / "config.json").write_text(encode_config(spec))
    plan = plan_checkpoint(read_config(tmp_path), spec)
    sizes = [len(encode_header(tensors)) + sum(t.num_bytes for t in tensors) for _, tensors in plan.shards]
    # Layers 0..3 as released; the fifth and last is an MLA layer here, as the fourth is; then what is no layer.
    assert sizes == [published[1], published[2], published[3], published[4], published[4], published[94]]
    assert plan.shard_bytes == sum(sizes)


def test_released_config_reads_as_the_real_one(tmp_path: Path, shared_data: Path) -> None:
    (tmp_path / "config.json").write_text(encode_config(released_spec(93)))
    assert read_config(tmp_path) == read_config(shared_data / "k3-release")


def test_index_and_summary_say_what_is_there(tmp_path: Path) -> None:
    summary = write_checkpoint(tmp_path / "m", replace(SMALL, sharding="packed", packed_shards=4), seed=1)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    shards = {path.name: read_shard(path) for path in (tmp_path / "m").glob("*.safetensors")}
    assert index["weight_map"] == {name: shard for shard, tensors in shards.items() for name in tensors}
    assert index["metadata"]["total_size"] == summary.tensor_bytes
    assert summary.tensor_bytes == sum(len(data) for tensors in shards.values() for _, _, data in tensors.values())
    assert (summary.num_shards, summary.num_tensors) == (4, len(index["weight_map"]))
    assert summary.file_bytes == sum(path.stat().st_size for path in (tmp_path / "m").iterdir())
    assert sorted(shards) == [f"model-{n:05d}-of-000004.safetensors" for n in range(1, 5)]


# --- sharding ------------------------------------------------------------------------------------------------------


def test_release_sharding(small_dir: Path) -> None:
    paths = sorted(small_dir.glob("*.safetensors"))
    assert len(paths) == SMALL.num_hidden_layers + 1
    for layer, path in enumerate(paths[:-1]):
        assert all(name.startswith(f"language_model.model.layers.{layer}.") for name in read_shard(path))
    assert not any(".layers." in name for name in read_shard(paths[-1]))


def test_packed_sharding_mixes_layers_and_parts_experts_from_their_trunk(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", replace(SMALL, sharding="packed", packed_shards=4), seed=1)
    shards = [list(read_shard(path)) for path in sorted((tmp_path / "m").glob("*.safetensors"))]
    layers = [{int(found[1]) for name in shard if (found := re.search(r"layers\.(\d+)\.", name))} for shard in shards]
    assert any(len(found) > 1 for found in layers)
    trunk_shards = {i for i, shard in enumerate(shards) for name in shard if "layers.2.self_attn" in name}
    expert_shards = {
        i for i, shard in enumerate(shards) for name in shard if "layers.2." in name and "experts.5." in name
    }
    assert trunk_shards.isdisjoint(expert_shards)


def test_cut_by_bytes() -> None:
    tensors = [PlannedTensor(str(n), "U8", (size,)) for n, size in enumerate([5, 1, 1, 1, 90, 1, 1])]
    for parts in (1, 2, 3, 7, 100):
        cut = cut_by_bytes(tensors, parts)
        assert [t for part in cut for t in part] == tensors
        assert len(cut) <= parts and all(cut)
    narrow, wide = PlannedTensor("a", "U8", (1,)), PlannedTensor("b", "F32", (1,))
    assert in_file_order([narrow, wide]) == [wide, narrow]


# --- seeds ---------------------------------------------------------------------------------------------------------


def test_same_seed_same_bytes_whatever_the_sharding(tmp_path: Path, small_dir: Path) -> None:
    write_checkpoint(tmp_path / "again", SMALL, seed=1)
    assert digests(tmp_path / "again") == digests(small_dir)
    write_checkpoint(tmp_path / "packed", replace(SMALL, sharding="packed"), seed=1)
    assert read_all(tmp_path / "packed") == read_all(small_dir)
    write_checkpoint(tmp_path / "other", SMALL, seed=2)
    ours, other = read_all(small_dir), read_all(tmp_path / "other")
    assert ours.keys() == other.keys()
    assert [name for name in ours if ours[name] == other[name]] == []
    # No two tensors are alike (but scales: they have three values, and may be few).
    large = [data for _, _, data in ours.values() if len(data) > 128]
    assert len(set(large)) == len(large) > 200


def test_a_tensor_can_be_made_alone(small_dir: Path) -> None:
    written = read_all(small_dir)
    expert = "block_sparse_moe.experts.3."
    trunk = ("self_attn.A_log", "self_attn.dt_bias", "block_sparse_moe.gate.weight", "self_attn.q_conv1d.weight")
    for start, short in [*(("", short) for short in trunk), (expert, "w1.weight_packed"), (expert, "w2.weight_scale")]:
        name = f"language_model.model.layers.1.{start}{short}"
        dtype, shape, data = written[name]
        blocks = tensor_blocks(1, PlannedTensor(name, dtype, shape), short, SMALL.kda_num_heads)
        assert b"".join(block.tobytes() for block in blocks) == data, name
