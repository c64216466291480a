"""The weights of a run of layers: small tensors in memory, matrices from wherever they come.

Matrices are used in the tape's order (workers/tape/order.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from k3ray.kernels.threads import RowPool
from k3ray.workers.checkpoint.a_log import read_a_log
from k3ray.workers.checkpoint.binding import Binding
from k3ray.workers.checkpoint.tensors import TensorReader, require_finite
from k3ray.workers.model.config import ModelConfig
from k3ray.workers.model.finite import CheckedMatrix
from k3ray.workers.model.matrices import Matrices, Matrix

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class KdaWeights:
    """A KDA layer's attention. conv_*: (channels, kernel) f32. a_log: (heads,) f32."""

    q: Matrix
    k: Matrix
    v: Matrix
    conv_q: Float32Array
    conv_k: Float32Array
    conv_v: Float32Array
    f_a: Matrix
    f_b: Matrix
    a_log: Float32Array
    dt_bias: Float32Array
    beta: Matrix
    gate: Matrix
    out_norm: Float32Array
    out: Matrix


@dataclass(frozen=True, slots=True)
class MlaWeights:
    """An MLA layer's attention. kv_b: (heads * (nope + value), kv_lora), used folded, so only as a whole array."""

    q_a: Matrix
    q_a_norm: Float32Array
    q_b: Matrix
    kv_a: Matrix
    kv_a_norm: Float32Array
    kv_b: Matrix
    gate: Matrix
    out: Matrix


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """One gated MLP: the dense layers' own, and the shared experts of a MoE layer."""

    gate: Matrix
    up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """A MoE layer without its routed experts. bias: (experts,) f32. norm: (latent,) f32. None: not in this model."""

    router: Matrix
    bias: Float32Array
    down: Matrix
    norm: Float32Array | None
    up: Matrix
    shared: MlpWeights | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. The folds are norm_weight * proj_weight of the two AttnRes mixes, (hidden,) f32."""

    layer: int
    attention_fold: Float32Array
    attention_norm: Float32Array
    attention: KdaWeights | MlaWeights
    mlp_fold: Float32Array
    mlp_norm: Float32Array
    mlp: MlpWeights | MoeWeights


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """What turns the last layer's streams into logits."""

    fold: Float32Array
    norm: Float32Array
    head: Matrix


@dataclass(frozen=True, slots=True)
class WeightSources:
    """Everything that a slice's weights are read with. config: of the whole checkpoint."""

    binding: Binding
    reader: TensorReader
    matrices: Matrices
    pool: RowPool

    @property
    def config(self) -> ModelConfig:
        """The checkpoint's config."""
        return self.binding.config


class WeightReader:
    """Reads one layer's tensors by their short names and gives them the shapes that the kernels take."""

    def __init__(self, sources: WeightSources, layer: int, names: dict[str, str]) -> None:
        self._sources = sources
        self._config = sources.config
        self._layer = layer
        self._names = names

    def matrix(self, short_name: str) -> Matrix:
        """Return a matrix from where this slice's matrices come, its outputs looked at."""
        return CheckedMatrix(short_name, self._sources.matrices.matrix(self._layer, short_name, self._sources.pool))

    def vector(self, short_name: str) -> Float32Array:
        """Return a small tensor flattened and widened to float32; TensorReadError where it is not finite."""
        reader, name = self._sources.reader, self._names[short_name]
        return require_finite(reader.entry(name), widen(reader.read(name)).reshape(-1))

    def fold(self, norm: str, projection: str) -> Float32Array:
        """Return norm * projection: the product of two bf16 is exact in float32."""
        return self.vector(norm) * self.vector(projection)

    def mlp(self, prefix: str) -> MlpWeights:
        """Return the gated MLP whose tensors' short names begin with prefix."""
        return MlpWeights(*(self.matrix(f"{prefix}.{part}_proj.weight") for part in ("gate", "up", "down")))

    def kda(self) -> KdaWeights:
        """Return a KDA layer's attention."""
        channels = self._config.kda_num_heads * self._config.kda_head_dim

        def convolution(part: str) -> Float32Array:
            return self.vector(f"self_attn.{part}_conv1d.weight").reshape(channels, -1)

        return KdaWeights(
            q=self.matrix("self_attn.q_proj.weight"),
            k=self.matrix("self_attn.k_proj.weight"),
            v=self.matrix("self_attn.v_proj.weight"),
            conv_q=convolution("q"),
            conv_k=convolution("k"),
            conv_v=convolution("v"),
            f_a=self.matrix("self_attn.f_a_proj.weight"),
            f_b=self.matrix("self_attn.f_b_proj.weight"),
            a_log=read_a_log(self._sources.reader, self._names["self_attn.A_log"], self._config.kda_num_heads),
            dt_bias=self.vector("self_attn.dt_bias"),
            beta=self.matrix("self_attn.b_proj.weight"),
            gate=self.matrix("self_attn.g_proj.weight"),
            out_norm=self.vector("self_attn.o_norm.weight"),
            out=self.matrix("self_attn.o_proj.weight"),
        )

    def mla(self) -> MlaWeights:
        """Return an MLA layer's attention."""
        return MlaWeights(
            q_a=self.matrix("self_attn.q_a_proj.weight"),
            q_a_norm=self.vector("self_attn.q_a_layernorm.weight"),
            q_b=self.matrix("self_attn.q_b_proj.weight"),
            kv_a=self.matrix("self_attn.kv_a_proj_with_mqa.weight"),
            kv_a_norm=self.vector("self_attn.kv_a_layernorm.weight"),
            kv_b=self.matrix("self_attn.kv_b_proj.weight"),
            gate=self.matrix("self_attn.g_proj.weight"),
            out=self.matrix("self_attn.o_proj.weight"),
        )

    def moe(self) -> MoeWeights:
        """Return a MoE layer without its routed experts."""
        prefix = "block_sparse_moe"
        return MoeWeights(
            router=self.matrix(f"{prefix}.gate.weight"),
            bias=self.vector(f"{prefix}.gate.e_score_correction_bias"),
            down=self.matrix(f"{prefix}.routed_expert_down_proj.weight"),
            norm=self.vector(f"{prefix}.routed_expert_norm.weight") if self._config.latent_moe_use_norm else None,
            up=self.matrix(f"{prefix}.routed_expert_up_proj.weight"),
            shared=self.mlp(f"{prefix}.shared_experts") if self._config.num_shared_experts else None,
        )


def read_layer(sources: WeightSources, layer: int) -> LayerWeights:
    """Read everything of one layer (zero-based) but its routed experts."""
    config = sources.config
    weights = WeightReader(sources, layer, sources.binding.layer_tensors(layer))
    return LayerWeights(
        layer=layer,
        attention_fold=weights.fold("self_attention_res_norm.weight", "self_attention_res_proj.weight"),
        attention_norm=weights.vector("input_layernorm.weight"),
        attention=weights.mla() if config.is_mla(layer) else weights.kda(),
        mlp_fold=weights.fold("mlp_res_norm.weight", "mlp_res_proj.weight"),
        mlp_norm=weights.vector("post_attention_layernorm.weight"),
        mlp=weights.moe() if config.is_moe(layer) else weights.mlp("mlp"),
    )


def read_head(sources: WeightSources) -> HeadWeights:
    """Read the output mix, the final norm and the head."""
    weights = WeightReader(sources, sources.config.num_hidden_layers, sources.binding.top)
    return HeadWeights(
        fold=weights.fold("output_attn_res_norm.weight", "output_attn_res_proj.weight"),
        norm=weights.vector("norm.weight"),
        head=weights.matrix("lm_head.weight"),
    )


def widen(values: npt.NDArray[Any]) -> Float32Array:
    """Return bf16 bits (uint16) as float32, exactly; float32 as it is."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)
