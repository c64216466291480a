"""The synthetic checkpoint writer against the golden checkpoints' layout, the release's sizes, and its own promises."""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from k3ray.workers.checkpoint import synthetic, synthetic_values
from k3ray.workers.checkpoint.safetensors_file import PlannedTensor, cut_by_bytes, encode_header, in_file_order
from k3ray.workers.checkpoint.synthetic import SyntheticError, plan_checkpoint, write_checkpoint
from k3ray.workers.checkpoint.synthetic_spec import SyntheticSpec, encode_config, released_spec
from k3ray.workers.checkpoint.synthetic_values import tensor_blocks, to_bfloat16
from k3ray.workers.checkpoint.synthetic_vocabulary import added_tokens, make_tokens, train_merges
from k3ray.workers.model.config import ConfigError, ModelConfig, read_config

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


def as_floats(tensor: tuple[str, tuple[int, ...], bytes]) -> npt.NDArray[np.float32]:
    dtype, shape, data = tensor
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return np.frombuffer(data, "<f4").reshape(shape)


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


@pytest.mark.parametrize("block_words", [1, 7, 1 << 17])
def test_a_tensor_is_reproducible_alone_in_any_blocks(
    small_dir: Path, monkeypatch: pytest.MonkeyPatch, block_words: int
) -> None:
    monkeypatch.setattr(synthetic_values, "BLOCK_WORDS", block_words)
    written = read_all(small_dir)
    for short in ("self_attn.A_log", "self_attn.dt_bias", "block_sparse_moe.gate.weight", "self_attn.q_conv1d.weight"):
        name = f"language_model.model.layers.1.{short}"
        dtype, shape, data = written[name]
        blocks = tensor_blocks(1, PlannedTensor(name, dtype, shape), short, SMALL.kda_num_heads)
        assert b"".join(block.tobytes() for block in blocks) == data
    for short in ("w1.weight_packed", "w2.weight_scale"):
        name = f"language_model.model.layers.1.block_sparse_moe.experts.3.{short}"
        dtype, shape, data = written[name]
        blocks = tensor_blocks(1, PlannedTensor(name, dtype, shape), short, SMALL.kda_num_heads)
        assert b"".join(block.tobytes() for block in blocks) == data


def test_codes_are_the_raw_stream_of_the_bit_generator() -> None:
    """numpy promises the bit generators' streams for ever, but not how integers() draws from them."""
    tensor = PlannedTensor("some.weight_packed", "U8", (100, 8))
    codes = b"".join(block.tobytes() for block in tensor_blocks(5, tensor, "w1.weight_packed", 1))
    key = int.from_bytes(hashlib.sha256(b"5/some.weight_packed").digest(), "little")
    assert codes == np.random.SFC64(key).random_raw(100).astype("<u8").tobytes()


def test_to_bfloat16_rounds_to_even() -> None:
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -0.0, -3.14159, 1e-40])
    expected = [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0x8000, 0xC049, 0x0001]
    assert to_bfloat16(values).tolist() == expected


# --- values --------------------------------------------------------------------------------------------------------


def test_a_log_has_a_zero_tail_after_the_heads(small_dir: Path) -> None:
    for name, tensor in read_all(small_dir).items():
        if name.endswith("A_log"):
            values = as_floats(tensor)
            assert values.shape == (SMALL.kda_head_dim,)
            assert np.all(values[: SMALL.kda_num_heads] != 0) and np.all(values[SMALL.kda_num_heads :] == 0)


def test_decay_parameters_are_distributed_like_the_released_ones() -> None:
    a_log = _flat("self_attn.A_log", "F32", (4096,))
    dt_bias = _flat("self_attn.dt_bias", "F32", (20_000,))
    # CHECKPOINT.md "Statistics": A_log median -0.1533, p10..p90 -0.5367..0.0743, -0.7531..2.4661
    assert np.percentile(a_log, [10, 50, 90]) == pytest.approx([-0.52, -0.2, 0.12], abs=0.05)
    assert a_log.min() > -0.7532 and 1.0 < a_log.max() < 2.4662
    # dt_bias median -4.6220, p10..p90 -6.4912..-2.5690, -7.8938..0.1792
    assert np.percentile(dt_bias, [10, 50, 90]) == pytest.approx([-6.47, -4.55, -2.63], abs=0.1)
    assert dt_bias.min() > -7.91 and dt_bias.max() < 0.21


def _flat(short: str, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    tensor = PlannedTensor(short, dtype, shape)
    data = b"".join(block.tobytes() for block in tensor_blocks(0, tensor, short, 1 << 30))
    return as_floats((dtype, shape, data)).ravel()


@pytest.mark.parametrize(
    ("short", "mean", "std"),
    [
        ("input_layernorm.weight", 1.0, 0.15),
        ("self_attn.q_proj.weight", 0.0, 1 / 16),
        ("self_attn.g_proj.weight", 0.0, 1 / 16),
        ("self_attn.b_proj.weight", 0.0, 1.5 / 16),
        ("self_attn.q_b_proj.weight", 0.0, 2 / 16),
        ("self_attn.f_b_proj.weight", 0.0, 1 / 16),
        ("block_sparse_moe.gate.weight", 0.0, 1.6 / 16),
        ("block_sparse_moe.routed_expert_down_proj.weight", 0.0, 1 / 16),
        ("block_sparse_moe.shared_experts.down_proj.weight", 0.0, 0.4 / 16),
        ("mlp.gate_proj.weight", 0.0, 1.5 / 16),
        ("embed_tokens.weight", 0.0, 1.0),
        ("lm_head.weight", 0.0, 2.8 / 16),
    ],
)
def test_magnitudes(short: str, mean: float, std: float) -> None:
    values = _flat(short, "BF16", (200, 256))
    assert values.mean() == pytest.approx(mean, abs=0.05 * std)
    assert values.std() == pytest.approx(std, rel=0.03)
    assert np.isfinite(values).all() and abs(values - mean).max() > 3.5 * std


@pytest.mark.parametrize("columns", [32, 96, 3584])
def test_expert_weights_have_the_std_of_a_projection(columns: int) -> None:
    scales = b"".join(
        block.tobytes()
        for block in tensor_blocks(0, PlannedTensor("s", "U8", (500, columns // 32)), "w2.weight_scale", 1)
    )
    used = np.frombuffer(scales, np.uint8).astype(int)
    centre = int(np.median(used))
    assert set(used.tolist()) == {centre - 1, centre, centre + 1}
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    std = np.sqrt((table**2).mean()) * 2.0 ** (centre - 127) * np.sqrt(columns)
    assert 2**-0.5 < std < 2**0.5


# --- vocabulary ----------------------------------------------------------------------------------------------------


def test_made_tokens_are_unique_and_reachable() -> None:
    tokens = make_tokens("ab ab abc", 1000, seed=4)
    assert len(tokens) == len(set(tokens)) == 1000
    assert sorted(tokens[:256]) == [bytes([byte]) for byte in range(256)] and tokens[0] == b"!"
    known = set(tokens[:256])
    for token in tokens[256:]:
        assert any(token[:cut] in known and token[cut:] in known for cut in range(1, len(token)))
        known.add(token)


def test_training_finishes_characters_first() -> None:
    assert train_merges("中文中文 the the the", 1000)[256:] == [
        "中".encode()[:2],
        "文".encode()[:2],
        "中".encode(),
        "文".encode(),
        b"he",
        b"the",
        b" the",
        "中文".encode(),
        "中文中文".encode(),
    ]


def test_added_tokens_lie_where_the_release_has_them() -> None:
    ids = {name: token_id for token_id, (name, _) in added_tokens(163_584, 256).items()}
    assert ids["<|end_of_msg|>"] == 163_586 and ids["[EOT]"] == 163_593 and ids["<|media_begin|>"] == 163_602
    assert ids["<osagent_mode>"] == 163_649 and ids["[UNK]"] == 163_838 and ids["[PAD]"] == 163_839
    assert len(added_tokens(488, 24)) == 15 and max(added_tokens(488, 24)) == 511


# --- the disk, and what is refused ---------------------------------------------------------------------------------


def test_memory_is_bounded_and_progress_is_told(tmp_path: Path) -> None:
    spec = replace(SMALL, num_hidden_layers=1, intermediate_size=65_536, hidden_size=256)
    told: list[tuple[int, int]] = []
    tracemalloc.start()
    try:
        summary = write_checkpoint(
            tmp_path / "m", spec, seed=1, progress=lambda done, total: told.append((done, total))
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert summary.tensor_bytes > 100e6 and peak < 12e6
    assert told == sorted(told) and told[-1] == (summary.tensor_bytes, summary.tensor_bytes)
    assert {total for _, total in told} == {summary.tensor_bytes}


def test_an_empty_directory_is_used_and_any_other_refused(tmp_path: Path) -> None:
    target = tmp_path / "m"
    target.mkdir()
    write_checkpoint(target, SMALL, seed=1)
    before = digests(target)
    with pytest.raises(SyntheticError, match="not an empty directory") as caught:
        write_checkpoint(target, SMALL, seed=2)
    assert caught.value.exit_code == 2
    assert digests(target) == before
    (tmp_path / "file").write_text("x")
    for bad in (tmp_path / "file", tmp_path / "file" / "m", tmp_path / "missing" / "m"):
        with pytest.raises(SyntheticError, match=r"file|missing"):
            write_checkpoint(bad, SMALL, seed=1)
    assert {path.name for path in tmp_path.iterdir()} == {"m", "file"}


def test_a_disk_too_small_is_refused_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=64 << 20))
    monkeypatch.setattr(synthetic, "write_shard", lambda *arguments: pytest.fail("wrote"))
    with pytest.raises(SyntheticError, match=r"0\.07 GB free, the checkpoint needs 0\.00 GB"):
        write_checkpoint(tmp_path / "m", SMALL, seed=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_half_way_leaves_nothing(tmp_path: Path, failure: BaseException) -> None:
    def fail(done: int, total: int) -> None:
        if done > total // 2:
            raise failure

    with pytest.raises(SyntheticError if isinstance(failure, OSError) else KeyboardInterrupt, match=r"No space|^$"):
        write_checkpoint(tmp_path / "m", SMALL, seed=1, progress=fail)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"added_slots": 23}, SyntheticError, "added_slots: found 23, expected at least 24"),
        ({"vocab_size": 287}, SyntheticError, "vocab_size: found 287, expected at least 288"),
        ({"sharding": "other"}, SyntheticError, "sharding: found 'other'"),
        ({"packed_shards": 0}, SyntheticError, "in 0 shards"),
        ({"moe_intermediate_size": 48}, ConfigError, "moe_intermediate_size: found 48"),
        ({"num_experts": 3}, ConfigError, "num_experts_per_token"),
        ({"mla_layers": (1, 7)}, ConfigError, "full_attn_layers"),
        ({"hidden_size": 0}, ConfigError, "hidden_size: found 0"),
    ],
)
def test_impossible_widths(tmp_path: Path, change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        write_checkpoint(tmp_path / "m", replace(SMALL, **change), seed=1)
    assert list(tmp_path.iterdir()) == []


def test_every_width_of_the_spec_reaches_the_config(tmp_path: Path) -> None:
    """Each field of the spec that ModelConfig has, changed alone, is what read_config gives back."""
    fields = {name: getattr(SMALL, name) for name in ModelConfig.__dataclass_fields__ if hasattr(SMALL, name)}
    changes: dict[str, Any] = {name: value + 32 for name, value in fields.items() if type(value) is int}
    changes |= {"num_experts_per_token": 5, "first_k_dense_replace": 3, "conv_kernel_size": 3, "num_hidden_layers": 7}
    changes |= {"moe_renormalize": False, "latent_moe_use_norm": False, "mla_layers": (0, 3)}
    changes |= dict.fromkeys(("routed_scaling_factor", "situ_beta", "situ_linear_beta", "rms_norm_eps"), 1.75)
    changes |= {"gate_lower_bound": -3.5}
    for name, value in changes.items():
        (tmp_path / "config.json").write_text(encode_config(replace(SMALL, **{name: value})))
        assert getattr(read_config(tmp_path), name) == value, name
    assert len(changes) >= 24
