"""Which matrices are on the tape and in which order: that of their use in attention.py, feed_forward.py and slice.py.

Small tensors (norms, convolutions, A_log, dt_bias, biases) are not on it: they stay in memory, read from the shards.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3ray.workers.checkpoint import shapes
from k3ray.workers.checkpoint.binding import Binding
from k3ray.workers.model.config import ModelConfig

_KDA = ("q_proj", "k_proj", "v_proj", "f_a_proj", "f_b_proj", "b_proj", "g_proj", "o_proj")
_MLA = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "g_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_MOE = (
    "gate",
    "routed_expert_down_proj",
    *(f"shared_experts.{part}" for part in _MLP),
    "routed_expert_up_proj",
)
KV_B = "self_attn.kv_b_proj.weight"  # used folded, so as one array, never row by row
_ITEM_BYTES = {"BF16": 2, "F32": 4}


@dataclass(frozen=True, slots=True)
class TapeTensor:
    """One matrix of the tape. layer: zero-based; the head counts as one layer more than the model has."""

    layer: int
    short: str
    dtype: str
    rows: int
    columns: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.columns * _ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * self.row_bytes


def tape_tensors(config: ModelConfig) -> tuple[TapeTensor, ...]:
    """Every matrix of the tape in execution order: the layers', then the head."""
    tensors: list[TapeTensor] = []
    for layer in range(config.num_hidden_layers):
        table = shapes.layer_tensors(config, layer)
        tensors += [_matrix(layer, short, table[short]) for short in _layer_order(config, layer) if short in table]
    head = shapes.top_tensors(config)[shapes.LM_HEAD]
    return (*tensors, _matrix(config.num_hidden_layers, shapes.LM_HEAD, head))


def full_name(binding: Binding, tensor: TapeTensor) -> str:
    """The tensor's name in the shards."""
    if tensor.layer == binding.config.num_hidden_layers:
        return shapes.top_name(binding.prefix, tensor.short)
    return shapes.layer_name(binding.prefix, tensor.layer, tensor.short)


def _layer_order(config: ModelConfig, layer: int) -> list[str]:
    """Short names in the order of use; shared experts are left out by the caller where the model has none."""
    attention = _MLA if config.is_mla(layer) else _KDA
    feed_forward = ("block_sparse_moe", _MOE) if config.is_moe(layer) else ("mlp", _MLP)
    return [f"{block}.{part}.weight" for block, parts in (("self_attn", attention), feed_forward) for part in parts]


def _matrix(layer: int, short: str, tensor: shapes.TensorType) -> TapeTensor:
    dtype, (rows, columns) = tensor
    return TapeTensor(layer, short, dtype, rows, columns)
