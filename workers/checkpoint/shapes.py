"""The table of every tensor of the text model: its short name, stored dtype and exact shape, as the config's sizes say.

Short names are those below `...layers.{l}.` (layers), `...experts.{e}.` (experts) and the text prefix (the rest). Docs:
MODEL.md and CHECKPOINT.md "Shapes". Shapes are row-major (out, in). Knows neither files nor which tensors exist.
"""

from __future__ import annotations

import math

from k3ray.workers.model.config import ModelConfig

TensorType = tuple[str, tuple[int, ...]]  # (safetensors dtype, shape)

RELEASED_PREFIX = "language_model.model."
CONVERTED_PREFIX = "model."
EXPERTS = "block_sparse_moe.experts."
OPTIONAL_PARTS = ("block_sparse_moe.routed_expert_norm.", "block_sparse_moe.shared_experts.")  # config may leave out
A_LOG = "self_attn.A_log"
LM_HEAD = "lm_head.weight"
EXPERT_MATRICES = ("w1", "w2", "w3")  # gate, down, up
_BYTES = {"BF16": 2, "F32": 4, "U8": 1}
MXFP4_GROUP = 32  # columns that share one scale byte


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorType]:
    """Every tensor of a zero-based layer except its routed experts, by short name.

    A_log is given as the release stores it, (kda_head_dim,) with zeros after the heads, when that holds all heads.
    """
    hidden = config.hidden_size
    tensors: dict[str, TensorType] = {
        "input_layernorm.weight": ("BF16", (hidden,)),
        "post_attention_layernorm.weight": ("BF16", (hidden,)),
        "self_attention_res_norm.weight": ("BF16", (hidden,)),
        "self_attention_res_proj.weight": ("BF16", (1, hidden)),
        "mlp_res_norm.weight": ("BF16", (hidden,)),
        "mlp_res_proj.weight": ("BF16", (1, hidden)),
    }
    tensors |= _mla_tensors(config) if config.is_mla(layer) else _kda_tensors(config)
    tensors |= _moe_tensors(config) if config.is_moe(layer) else _mlp("mlp", hidden, config.intermediate_size)
    return tensors


def expert_tensors(config: ModelConfig) -> dict[str, TensorType]:
    """The six tensors of one routed expert: packed nibbles, two columns a byte, and one scale byte per 32 columns."""
    latent, inner = config.routed_expert_hidden_size, config.moe_intermediate_size
    tensors: dict[str, TensorType] = {}
    for matrix, rows, columns in (("w1", inner, latent), ("w2", latent, inner), ("w3", inner, latent)):
        tensors[f"{matrix}.weight_packed"] = ("U8", (rows, columns // 2))
        tensors[f"{matrix}.weight_scale"] = ("U8", (rows, columns // MXFP4_GROUP))
    return tensors


def top_tensors(config: ModelConfig) -> dict[str, TensorType]:
    """The tensors outside the layers. `lm_head.weight` lies beside `model.`, the others under it: see full_name."""
    hidden, vocab = config.hidden_size, config.vocab_size
    return {
        "embed_tokens.weight": ("BF16", (vocab, hidden)),
        "norm.weight": ("BF16", (hidden,)),
        "output_attn_res_norm.weight": ("BF16", (hidden,)),
        "output_attn_res_proj.weight": ("BF16", (1, hidden)),
        LM_HEAD: ("BF16", (vocab, hidden)),
    }


def nbytes(tensor: TensorType) -> int:
    """Bytes of a tensor of the table."""
    dtype, shape = tensor
    return math.prod(shape) * _BYTES[dtype]


def top_name(prefix: str, short: str) -> str:
    """The full name of a tensor outside the layers."""
    return prefix.removesuffix("model.") + short if short == LM_HEAD else prefix + short


def layer_name(prefix: str, layer: int, short: str) -> str:
    """The full name of a layer's tensor."""
    return f"{prefix}layers.{layer}.{short}"


def expert_name(prefix: str, layer: int, expert: int, short: str) -> str:
    """The full name of a routed expert's tensor."""
    return f"{prefix}layers.{layer}.{EXPERTS}{expert}.{short}"


def _kda_tensors(config: ModelConfig) -> dict[str, TensorType]:
    hidden, heads, dim, width = config.hidden_size, config.kda_num_heads, config.kda_head_dim, config.kda_width
    tensors: dict[str, TensorType] = {
        A_LOG: ("F32", (max(dim, heads),)),
        "self_attn.dt_bias": ("F32", (width,)),
        "self_attn.b_proj.weight": ("BF16", (heads, hidden)),
        "self_attn.f_a_proj.weight": ("BF16", (dim, hidden)),
        "self_attn.f_b_proj.weight": ("BF16", (width, dim)),
        "self_attn.g_proj.weight": ("BF16", (width, hidden)),
        "self_attn.o_norm.weight": ("F32", (dim,)),
        "self_attn.o_proj.weight": ("BF16", (hidden, width)),
    }
    for part in ("q", "k", "v"):
        tensors[f"self_attn.{part}_proj.weight"] = ("BF16", (width, hidden))
        tensors[f"self_attn.{part}_conv1d.weight"] = ("F32", (width, 1, config.conv_kernel_size))
    return tensors


def _mla_tensors(config: ModelConfig) -> dict[str, TensorType]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    return {
        "self_attn.q_a_proj.weight": ("BF16", (config.q_lora_rank, hidden)),
        "self_attn.q_a_layernorm.weight": ("BF16", (config.q_lora_rank,)),
        "self_attn.q_b_proj.weight": ("BF16", (heads * (nope + rope), config.q_lora_rank)),
        "self_attn.kv_a_proj_with_mqa.weight": ("BF16", (config.kv_lora_rank + rope, hidden)),
        "self_attn.kv_a_layernorm.weight": ("BF16", (config.kv_lora_rank,)),
        "self_attn.kv_b_proj.weight": ("BF16", (heads * (nope + value), config.kv_lora_rank)),
        "self_attn.g_proj.weight": ("BF16", (heads * value, hidden)),
        "self_attn.o_proj.weight": ("BF16", (hidden, heads * value)),
    }


def _moe_tensors(config: ModelConfig) -> dict[str, TensorType]:
    hidden, latent = config.hidden_size, config.routed_expert_hidden_size
    tensors: dict[str, TensorType] = {
        "block_sparse_moe.gate.weight": ("BF16", (config.num_experts, hidden)),
        "block_sparse_moe.gate.e_score_correction_bias": ("F32", (config.num_experts,)),
        "block_sparse_moe.routed_expert_down_proj.weight": ("BF16", (latent, hidden)),
        "block_sparse_moe.routed_expert_up_proj.weight": ("BF16", (hidden, latent)),
    }
    if config.latent_moe_use_norm:
        tensors["block_sparse_moe.routed_expert_norm.weight"] = ("BF16", (latent,))
    if config.num_shared_experts:
        tensors |= _mlp("block_sparse_moe.shared_experts", hidden, config.shared_intermediate_size)
    return tensors


def _mlp(name: str, hidden: int, inner: int) -> dict[str, TensorType]:
    return {
        f"{name}.gate_proj.weight": ("BF16", (inner, hidden)),
        f"{name}.up_proj.weight": ("BF16", (inner, hidden)),
        f"{name}.down_proj.weight": ("BF16", (hidden, inner)),
    }
