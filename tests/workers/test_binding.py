"""Binding: every tensor of the text model by exact dtype and shape; what is missing, wrong or mixed is refused."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from pathlib import Path

import pytest

from k3ray.workers.checkpoint import shapes
from k3ray.workers.checkpoint.binding import BindError, Binding, bind
from k3ray.workers.checkpoint.index import open_index, open_names
from k3ray.workers.checkpoint.leftovers import unused_line
from k3ray.workers.model.config import ModelConfig, read_config
from tests.zero_shards import RELEASED, Table, read_table, write

EXPERT = f"{RELEASED}layers.3.block_sparse_moe.experts.7.w1.weight_packed"


@pytest.fixture(scope="module")
def config(k3b_dir: Path) -> ModelConfig:
    return read_config(k3b_dir)


@pytest.fixture(scope="module")
def golden(k3b_dir: Path) -> Table:
    return read_table(k3b_dir)


def bind_table(folder: Path, config: ModelConfig, table: Table) -> Binding:
    return bind(config, open_index(write(folder, table), []))


def refusal(folder: Path, config: ModelConfig, table: Table) -> BindError:
    with pytest.raises(BindError) as caught:
        bind_table(folder, config, table)
    assert caught.value.exit_code == 1
    assert str(folder) in str(caught.value)
    return caught.value


@pytest.mark.parametrize(("fixture", "bound"), [("k3b_dir", 1002), ("k3a_dir", 2068)])
def test_goldens_bind(fixture: str, bound: int, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(fixture)
    index = open_index(folder, [])
    binding = bind(read_config(folder), index)
    assert (binding.prefix, binding.num_bound, binding.num_left) == (RELEASED, bound, 18)
    assert binding.left == {"vision": 15, "projector": 3}
    assert binding.shapes_checked
    assert binding.num_bound + binding.num_left == len(index)


def test_names_of_a_binding_are_those_of_the_files(config: ModelConfig, k3b_dir: Path, golden: Table) -> None:
    binding = bind(config, open_index(k3b_dir, []))
    names = list(binding.top.values())
    for layer in range(9):
        names += binding.layer_tensors(layer).values()
        for expert in range(16 if layer else 0):
            names += binding.expert_tensors(layer, expert).values()
    text = [name for name in golden if name.startswith("language_model.")]
    assert Counter(names) == Counter(text)
    assert binding.expert_tensors(3, 7)["w1.weight_packed"] == EXPERT
    assert binding.layer_tensors(4)["self_attn.A_log"] == f"{RELEASED}layers.4.self_attn.A_log"
    assert binding.top["lm_head.weight"] == "language_model.lm_head.weight"


def test_shape_table_is_the_goldens(k3a_dir: Path, k3b_dir: Path, golden: Table) -> None:
    config = read_config(k3b_dir)
    for short, (dtype, shape) in shapes.layer_tensors(config, 5).items():
        assert golden[f"{RELEASED}layers.5.{short}"] == (dtype, list(shape))
    for short, (dtype, shape) in shapes.expert_tensors(config).items():
        assert golden[f"{RELEASED}layers.5.block_sparse_moe.experts.0.{short}"] == (dtype, list(shape))


def test_shape_table_makes_the_published_sizes(shared_data: Path) -> None:
    config = read_config(shared_data / "k3-release")
    expert = sum(map(shapes.nbytes, shapes.expert_tensors(config).values()))
    trunk = [sum(map(shapes.nbytes, shapes.layer_tensors(config, layer).values())) for layer in range(93)]
    top = sum(map(shapes.nbytes, shapes.top_tensors(config).values()))
    assert expert == 17_547_264
    assert shapes.nbytes(shapes.top_tensors(config)["embed_tokens.weight"]) == 2_348_810_240
    assert round(sum(trunk) / 1e9, 2) == 108.81
    tables = [shapes.top_tensors(config), *(shapes.layer_tensors(config, layer) for layer in range(93))]
    assert sum(math.prod(shape) for table in tables for _, shape in table.values()) == 56_743_648_000
    sizes = dict(line.split() for line in (shared_data / "k3-release" / "shard_sizes.txt").read_text().splitlines())
    for layer in range(93):  # layer l is shard l + 1, whose rest is the header
        data = trunk[layer] + (896 * expert if layer else 0)
        header = int(sizes[f"model-{layer + 1:05d}-of-000096.safetensors"]) - data
        entries = len(shapes.layer_tensors(config, layer)) + (896 * 6 if layer else 0)
        assert 100 * entries < header < 190 * entries, layer
    assert 0 < int(sizes["model-00094-of-000096.safetensors"]) - top < 1000


def test_the_released_names_bind(shared_data: Path) -> None:
    config = read_config(shared_data / "k3-release")
    index = open_names(shared_data / "k3-release")
    binding = bind(config, index)
    assert not binding.shapes_checked
    assert binding.num_bound == 497_052
    assert binding.left == {"vision": 165, "projector": 3}
    experts = {short: count for short, count in binding.bound.items() if ".experts." in short}
    assert set(experts.values()) == {92 * 896}
    assert len(experts) == 6
    left = bind(config.truncated(5), index).left
    assert left["layers after the last"] == 497_052 - 5 - sum(
        len(shapes.layer_tensors(config, layer)) + (5376 if layer else 0) for layer in range(5)
    )


def test_binding_takes_no_step_per_expert(shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config(shared_data / "k3-release")
    index = open_names(shared_data / "k3-release")
    calls = []
    find = type(index).row
    monkeypatch.setattr(type(index), "row", lambda self, name: calls.append(name) or find(self, name))
    bind(config, index)
    assert len(calls) < 2600
    assert not [name for name in calls if ".experts." in name]


def test_the_converted_prefix(tmp_path: Path, config: ModelConfig, golden: Table) -> None:
    table = {name.removeprefix("language_model."): kind for name, kind in golden.items()}
    binding = bind_table(tmp_path, config, table)
    assert (binding.prefix, binding.num_bound) == ("model.", 1002)
    assert binding.top["lm_head.weight"] == "lm_head.weight"
    assert binding.layer_tensors(0)["self_attn.A_log"] == "model.layers.0.self_attn.A_log"
    assert binding.left == {"vision": 15, "projector": 3}


@pytest.mark.parametrize("part", ["layers.4.", "layers.1.block_sparse_moe.experts.2.", "norm.weight"])
def test_two_prefixes_are_refused(tmp_path: Path, config: ModelConfig, golden: Table, part: str) -> None:
    start = f"{RELEASED}{part}"
    table = {name.removeprefix("language_model.") if name.startswith(start) else name: k for name, k in golden.items()}
    assert "expected one prefix throughout" in str(refusal(tmp_path, config, table))


def test_a_head_under_the_other_prefix_is_refused(tmp_path: Path, config: ModelConfig, golden: Table) -> None:
    table = dict(golden)
    table["lm_head.weight"] = table.pop("language_model.lm_head.weight")
    assert "expected one prefix throughout" in str(refusal(tmp_path, config, table))


@pytest.mark.parametrize("prefix", ["", "model.language_model.", "transformer.", "Language_model.model."])
def test_binding_nothing_is_an_error(tmp_path: Path, config: ModelConfig, golden: Table, prefix: str) -> None:
    table = {prefix + name.removeprefix(RELEASED): kind for name, kind in golden.items() if name.startswith(RELEASED)}
    message = str(refusal(tmp_path, config, table))
    assert "bound nothing: found" in message
    assert "expected names below language_model.model. or model." in message


def test_no_tensor_at_all(tmp_path: Path, config: ModelConfig) -> None:
    assert "found 0 tensors such as no tensor at all" in str(refusal(tmp_path, config, {}))


def test_each_tensor_is_needed(tmp_path: Path, config: ModelConfig, golden: Table) -> None:
    first = {}
    for name in golden:
        if name.startswith("language_model."):
            first.setdefault(".".join("#" if part.isdigit() else part for part in name.split(".")), name)
    assert len(first) == 48
    for name in [*first.values(), f"{RELEASED}layers.8.block_sparse_moe.experts.15.w2.weight_scale"]:
        error = refusal(tmp_path, config, {other: kind for other, kind in golden.items() if other != name})
        assert error.count == 1
        assert f'"{name}": not in the checkpoint, expected {golden[name][0]} {golden[name][1]}' in error.problems[0]


@pytest.mark.parametrize("layer", [0, 3, 8])
def test_a_missing_layer(tmp_path: Path, config: ModelConfig, golden: Table, layer: int) -> None:
    gone = [name for name in golden if name.startswith(f"{RELEASED}layers.{layer}.")]
    error = refusal(tmp_path, config, {name: kind for name, kind in golden.items() if name not in gone})
    assert error.count == len(gone)
    assert len(error.problems) == min(20, len(gone))
    assert all(f"layers.{layer}." in problem for problem in error.problems)
    if len(gone) > 20:
        assert f"and {len(gone) - 20} more" in str(error)


@pytest.mark.parametrize(
    "short",
    [
        "layers.0.mlp.gate_proj.weight",
        "layers.0.self_attn.f_a_proj.weight",
        "layers.3.self_attn.kv_b_proj.weight",
        "layers.0.self_attn.q_conv1d.weight",
        "layers.3.block_sparse_moe.experts.7.w1.weight_packed",
        "layers.8.block_sparse_moe.experts.15.w2.weight_scale",
        "embed_tokens.weight",
    ],
)
def test_a_transposed_shape_is_refused(tmp_path: Path, config: ModelConfig, golden: Table, short: str) -> None:
    dtype, shape = golden[RELEASED + short]
    error = refusal(tmp_path, config, golden | {RELEASED + short: (dtype, shape[::-1])})
    assert error.count == 1
    assert f'a.safetensors: tensor "{RELEASED}{short}": found {dtype} {shape[::-1]} (transposed)' in error.problems[0]
    assert f"expected {dtype} {shape}" in error.problems[0]


@pytest.mark.parametrize(
    ("short", "kind"),
    [
        ("layers.0.self_attn.q_proj.weight", ("F16", [192, 160])),
        ("layers.0.self_attn.q_proj.weight", ("F32", [192, 160])),
        ("layers.0.self_attn.q_conv1d.weight", ("BF16", [192, 1, 4])),
        ("layers.0.self_attn.q_conv1d.weight", ("F32", [192, 4])),
        ("layers.0.input_layernorm.weight", ("BF16", [1, 160])),
        ("layers.0.mlp_res_proj.weight", ("BF16", [160])),
        ("layers.3.self_attn.q_b_proj.weight", ("BF16", [120, 56])),
        ("layers.1.block_sparse_moe.gate.weight", ("BF16", [32, 160])),
        ("layers.1.block_sparse_moe.gate.e_score_correction_bias", ("BF16", [16])),
        ("layers.3.block_sparse_moe.experts.7.w1.weight_packed", ("I8", [32, 48])),
        ("layers.3.block_sparse_moe.experts.7.w1.weight_packed", ("Q", [32, 48])),
        ("layers.3.block_sparse_moe.experts.7.w1.weight_packed", ("U8", [32, 96])),
        ("layers.3.block_sparse_moe.experts.7.w1.weight_packed", ("U8", [16, 48])),
        ("layers.3.block_sparse_moe.experts.7.w1.weight_scale", ("U8", [32, 1, 3])),
        ("layers.0.self_attn.A_log", ("F32", [2])),
        ("layers.0.self_attn.A_log", ("BF16", [64])),
        ("layers.0.self_attn.A_log", ("F32", [1, 1, 64, 1])),
        ("layers.0.self_attn.A_log", ("F32", [3, 1])),
    ],
)
def test_another_shape_or_dtype_is_refused(
    tmp_path: Path, config: ModelConfig, golden: Table, short: str, kind: tuple[str, list[int]]
) -> None:
    error = refusal(tmp_path, config, golden | {RELEASED + short: kind})
    assert error.count == 1
    assert f'tensor "{RELEASED}{short}": found {kind[0]} {kind[1]}' in error.problems[0]


def test_half_an_inner_width_and_twice_the_shared_experts(tmp_path: Path, k3a_dir: Path) -> None:
    """The shared experts keep their shape, the routed ones do not."""
    config = read_config(k3a_dir)
    changed = dataclasses.replace(config, moe_intermediate_size=32, num_shared_experts=4)
    with pytest.raises(BindError) as caught:
        bind(changed, open_index(k3a_dir, []))
    assert caught.value.count == 12 * 24 * 6
    assert "found U8 [64, 32], expected U8 [32, 32]" in str(caught.value)


@pytest.mark.parametrize("change", [{"num_experts": 17}, {"num_experts": 15}, {"num_experts": 65536}])
def test_another_number_of_experts(k3b_dir: Path, config: ModelConfig, change: dict[str, int]) -> None:
    with pytest.raises(BindError) as caught:
        bind(dataclasses.replace(config, **change), open_index(k3b_dir, []))
    missing = max(change["num_experts"] - 16, 0) * 8 * 6
    assert caught.value.count == 16 + missing  # router weight and bias of 8 layers, then the experts


def test_experts_of_a_layer_that_never_routes_there(tmp_path: Path, config: ModelConfig, golden: Table) -> None:
    gone = [name for name in golden if ".layers.8.block_sparse_moe.experts." in name and ".w3." in name]
    error = refusal(tmp_path, config, {name: kind for name, kind in golden.items() if name not in gone})
    assert error.count == len(gone) == 32
    assert sum(".layers.8.block_sparse_moe.experts.0.w3." in problem for problem in error.problems) == 2


@pytest.mark.parametrize("keep_packed", [True, False])
def test_packed_and_unpacked_experts_are_not_mixed(
    tmp_path: Path, config: ModelConfig, golden: Table, keep_packed: bool
) -> None:
    inside = f"{RELEASED}layers.3.block_sparse_moe.experts.7.w1"
    table = golden | {f"{inside}.weight": ("BF16", [32, 96])}
    if not keep_packed:
        del table[f"{inside}.weight_packed"], table[f"{inside}.weight_scale"]
    error = refusal(tmp_path, config, table)
    assert f'"{inside}.weight": a mix of packed and unpacked experts' in error.problems[0]


def test_unpacked_experts_throughout_are_refused(tmp_path: Path, config: ModelConfig, golden: Table) -> None:
    table = {name: kind for name, kind in golden.items() if ".experts." not in name}
    for layer in range(1, 9):
        for expert in range(16):
            for matrix in ("w1", "w2", "w3"):
                table[f"{RELEASED}layers.{layer}.block_sparse_moe.experts.{expert}.{matrix}.weight"] = ("BF16", [1])
    error = refusal(tmp_path, config, table)
    assert ": unpacked experts, 128 of this kind" in error.problems[0]
    assert error.count == 3 * 128 + 6 * 128


def test_what_is_left_is_counted_by_kind(tmp_path: Path, config: ModelConfig, golden: Table) -> None:
    extra: Table = {
        f"{RELEASED}layers.2.self_attn.rotary_emb.inv_freq": ("F32", [4]),
        f"{RELEASED}layers.9.input_layernorm.weight": ("BF16", [160]),
        f"{RELEASED}layers.11.block_sparse_moe.experts.3.w1.weight_packed": ("U8", [1]),
        f"{RELEASED}layers.02.input_layernorm.weight": ("BF16", [160]),
        "something.else": ("U8", [1]),
        "model.vision_tower.x": ("U8", [1]),
    }
    binding = bind_table(tmp_path, config, golden | extra)
    assert binding.num_bound == 1002
    assert binding.left == {
        "vision": 16,
        "projector": 3,
        "layers after the last": 2,
        "unused below the text prefix": 2,
        "other": 1,
    }


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        (f"{RELEASED}layers.2.self_attn.q_proj.bias", ("BF16", [192])),
        (f"{RELEASED}layers.3.self_attn.o_proj.bias", ("BF16", [160])),
        (f"{RELEASED}layers.1.block_sparse_moe.gate.bias", ("F32", [16])),
        (f"{RELEASED}layers.5.block_sparse_moe.experts.3.w1.bias", ("BF16", [64])),
        (f"{RELEASED}layers.4.input_layernorm.bias", ("BF16", [160])),
        ("language_model.lm_head.bias", ("BF16", [512])),
    ],
)
def test_a_bias_that_would_be_left_out_is_refused(
    tmp_path: Path, config: ModelConfig, golden: Table, name: str, tensor: tuple[str, list[int]]
) -> None:
    error = refusal(tmp_path, config, golden | {name: tensor})
    assert f'"{name}": found a bias, 1 of this kind; expected none' in error.problems[0]


def test_parts_that_only_the_config_leaves_out_are_refused(tmp_path: Path, config: ModelConfig, golden: Table) -> None:
    for other, kinds in (
        (dataclasses.replace(config, latent_moe_use_norm=False), ["routed_expert_norm"]),
        (dataclasses.replace(config, num_shared_experts=0), ["shared_experts"] * 3),
    ):
        error = refusal(tmp_path, other, golden)
        assert len(error.problems) == len(kinds) and error.count == 8 * len(kinds)
        assert all(kind in line for kind, line in zip(kinds, error.problems, strict=True))
        assert "a part that the config leaves out" in error.problems[0]


def test_what_looks_like_the_model_and_is_not_used_is_told(tmp_path: Path, config: ModelConfig, golden: Table) -> None:
    assert unused_line(bind_table(tmp_path, config, golden).left) == ""
    extra: Table = {
        f"{RELEASED}layers.2.self_attn.q_norm.weight": ("BF16", [64]),
        f"{RELEASED}layers.9.input_layernorm.weight": ("BF16", [160]),
    }
    line = unused_line(bind_table(tmp_path, config, golden | extra).left)
    assert "1 unused below the text prefix, 1 layers after the last" in line


def test_fewer_layers_bind_fewer_tensors(k3b_dir: Path, config: ModelConfig, golden: Table) -> None:
    later = [name for name in golden if name.startswith(tuple(f"{RELEASED}layers.{layer}." for layer in range(4, 9)))]
    binding = bind(config.truncated(4), open_index(k3b_dir, []))
    assert binding.left["layers after the last"] == len(later)
    assert binding.num_bound == 1002 - len(later)
