"""A layer's weights are the tensors of the released names, each in the place where the formulas use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from k3ray.kernels.threads import RowPool
from k3ray.workers.checkpoint.binding import bind
from k3ray.workers.checkpoint.index import open_index
from k3ray.workers.checkpoint.tensors import TensorReader
from k3ray.workers.model.config import read_config
from k3ray.workers.model.finite import CheckedMatrix
from k3ray.workers.model.matrices import ShardMatrices
from k3ray.workers.model.weights import (
    KdaWeights,
    MlaWeights,
    MlpWeights,
    MoeWeights,
    WeightSources,
    read_head,
    read_layer,
    widen,
)

TOP = "language_model.model."


@pytest.fixture(scope="module")
def sources(k3b_dir: Path) -> WeightSources:
    index = open_index(k3b_dir, [])
    binding, reader = bind(read_config(k3b_dir), index), TensorReader(index)
    return WeightSources(binding, reader, ShardMatrices(binding, reader), RowPool(1))


def check(reader: TensorReader, start: str, found: dict[str, npt.NDArray[Any] | CheckedMatrix]) -> None:
    """Every matrix is the named tensor as stored, every vector the same widened and flattened; bits, not values."""
    for short, value in found.items():
        stored = reader.read(start + short)
        if isinstance(value, CheckedMatrix):
            assert value.array().dtype == stored.dtype and value.array().shape == stored.shape, short
            assert value.array().tobytes() == stored.tobytes(), short
        else:
            assert value.tobytes() == widen(stored).tobytes(), short


def mlp(weights: MlpWeights, start: str) -> dict[str, npt.NDArray[Any] | CheckedMatrix]:
    names = ("gate_proj", "up_proj", "down_proj")
    return {
        f"{start}.{name}.weight": m for name, m in zip(names, (weights.gate, weights.up, weights.down), strict=True)
    }


@pytest.mark.parametrize("layer", [0, 5])
def test_kda(sources: WeightSources, layer: int) -> None:
    reader = sources.reader
    weights = read_layer(sources, layer).attention
    assert isinstance(weights, KdaWeights)
    found: dict[str, npt.NDArray[Any] | CheckedMatrix] = {
        "q_proj.weight": weights.q, "k_proj.weight": weights.k, "v_proj.weight": weights.v,
        "q_conv1d.weight": weights.conv_q, "k_conv1d.weight": weights.conv_k, "v_conv1d.weight": weights.conv_v,
        "f_a_proj.weight": weights.f_a, "f_b_proj.weight": weights.f_b, "dt_bias": weights.dt_bias,
        "b_proj.weight": weights.beta, "g_proj.weight": weights.gate,
        "o_norm.weight": weights.out_norm, "o_proj.weight": weights.out,
    }  # fmt: skip
    check(reader, f"{TOP}layers.{layer}.self_attn.", found)
    assert weights.conv_q.shape == (192, 4)
    a_log = reader.read(f"{TOP}layers.{layer}.self_attn.A_log")
    assert a_log.shape == (64,) and weights.a_log.tobytes() == a_log[:3].tobytes()  # one entry a head, of three heads


@pytest.mark.parametrize("layer", [3, 8])
def test_mla(sources: WeightSources, layer: int) -> None:
    reader = sources.reader
    weights = read_layer(sources, layer).attention
    assert isinstance(weights, MlaWeights)
    found: dict[str, npt.NDArray[Any] | CheckedMatrix] = {
        "q_a_proj.weight": weights.q_a, "q_a_layernorm.weight": weights.q_a_norm, "q_b_proj.weight": weights.q_b,
        "kv_a_proj_with_mqa.weight": weights.kv_a, "kv_a_layernorm.weight": weights.kv_a_norm,
        "g_proj.weight": weights.gate, "o_proj.weight": weights.out,
    }  # fmt: skip
    start = f"{TOP}layers.{layer}.self_attn."
    check(reader, start, found)
    assert weights.kv_b.array().tobytes() == reader.read(f"{start}kv_b_proj.weight").tobytes()


def test_mixture_and_dense_mlp(sources: WeightSources) -> None:
    reader = sources.reader
    dense, routed = (read_layer(sources, layer).mlp for layer in (0, 6))
    assert isinstance(dense, MlpWeights) and isinstance(routed, MoeWeights) and routed.norm is not None
    check(reader, f"{TOP}layers.0.", mlp(dense, "mlp"))
    found: dict[str, npt.NDArray[Any] | CheckedMatrix] = {
        "gate.weight": routed.router, "gate.e_score_correction_bias": routed.bias,
        "routed_expert_down_proj.weight": routed.down, "routed_expert_up_proj.weight": routed.up,
        "routed_expert_norm.weight": routed.norm,
    }  # fmt: skip
    check(reader, f"{TOP}layers.6.block_sparse_moe.", found | mlp(routed.shared, "shared_experts"))


def test_norms_and_folds(sources: WeightSources) -> None:
    reader = sources.reader
    layer, head = read_layer(sources, 4), read_head(sources)
    start = f"{TOP}layers.4."
    norms: dict[str, npt.NDArray[Any] | CheckedMatrix] = {
        "input_layernorm.weight": layer.attention_norm, "post_attention_layernorm.weight": layer.mlp_norm
    }  # fmt: skip
    check(reader, start, norms)
    check(reader, TOP, {"norm.weight": head.norm})
    check(reader, "language_model.", {"lm_head.weight": head.head})
    folds = {f"{start}self_attention_res": layer.attention_fold, f"{start}mlp_res": layer.mlp_fold}
    for name, fold in (folds | {f"{TOP}output_attn_res": head.fold}).items():
        norm, projection = (widen(reader.read(f"{name}_{part}.weight")).astype(np.float64) for part in ("norm", "proj"))
        assert np.array_equal(fold, (norm * projection).reshape(-1))
