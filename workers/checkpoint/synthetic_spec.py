"""What a synthetic checkpoint shall be: its widths, vocabulary and sharding, and the config.json that says so."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

SAMPLE_TEXT = (
    "The small model reads the words of the text and writes the next word. The next word is not the right word, "
    "because the weights of the small model are random; the machine that reads them is not. "
    "小模型读文字，写文字。小模型的权重是随机的，机器读权重，写下一个文字。"
)


@dataclass(frozen=True, slots=True)
class SyntheticSpec:
    """A synthetic checkpoint, small by default; field names are ModelConfig's. Checked when it is written."""

    num_hidden_layers: int = 5
    hidden_size: int = 64
    vocab_size: int = 512
    intermediate_size: int = 128
    first_k_dense_replace: int = 1
    attn_res_block_size: int = 2
    mla_layers: tuple[int, ...] | None = None  # zero-based; None: every fourth layer and the last, as in the release
    kda_num_heads: int = 2
    kda_head_dim: int = 32
    conv_kernel_size: int = 4
    gate_lower_bound: float = -5.0
    num_attention_heads: int = 2
    q_lora_rank: int = 48
    kv_lora_rank: int = 32
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    num_experts: int = 16
    num_experts_per_token: int = 4
    num_shared_experts: int = 2
    routed_expert_hidden_size: int = 32
    moe_intermediate_size: int = 32
    routed_scaling_factor: float = 1.0
    moe_renormalize: bool = True
    latent_moe_use_norm: bool = True
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0
    rms_norm_eps: float = 1e-5
    added_slots: int = 32  # ids after the ranks; the release has 256
    vocabulary_text: str = SAMPLE_TEXT  # what the merges are trained on, as far as it goes
    sharding: Literal["release", "packed"] = "release"
    packed_shards: int = 3

    @property
    def num_ranks(self) -> int:
        """Byte-pair tokens of the vocabulary: all ids that are not added slots."""
        return self.vocab_size - self.added_slots

    @property
    def full_attention_layers(self) -> tuple[int, ...]:
        """The zero-based MLA layers."""
        if self.mla_layers is not None:
            return self.mla_layers
        last = self.num_hidden_layers - 1
        return tuple(layer for layer in range(self.num_hidden_layers) if layer % 4 == 3 or layer == last)


def released_spec(num_hidden_layers: int, num_experts: int = 896) -> SyntheticSpec:
    """The released widths, cut to a number of layers and of experts."""
    return SyntheticSpec(
        num_hidden_layers=num_hidden_layers,
        hidden_size=7168,
        vocab_size=163_840,
        intermediate_size=33_792,
        attn_res_block_size=12,
        kda_num_heads=96,
        kda_head_dim=128,
        num_attention_heads=96,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        num_experts=num_experts,
        num_experts_per_token=16,
        routed_expert_hidden_size=3584,
        moe_intermediate_size=3072,
        added_slots=256,
    )


def encode_config(spec: SyntheticSpec) -> str:
    """The text of config.json: nested like the released one, with the keys that mean something to a reader."""
    ids = {
        "bos_token_id": spec.num_ranks,
        "eos_token_id": spec.num_ranks + 2,
        "pad_token_id": spec.vocab_size - 1,
    }
    document = {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "media_placeholder_token_id": spec.num_ranks + 21,
        **ids,
        "text_config": {**_released_fields(), **_sizes(spec), **ids},
    }
    return json.dumps(document, indent=2) + "\n"


def encode_generation_config(spec: SyntheticSpec) -> str:
    """The text of generation_config.json."""
    ids = {"eos_token_id": spec.num_ranks + 2, "bos_token_id": spec.num_ranks, "pad_token_id": spec.vocab_size - 1}
    return json.dumps({**ids, "do_sample": False}, indent=2) + "\n"


def _released_fields() -> dict[str, object]:
    """The fields that are the same in every model of this family."""
    weights = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": 32,
        "num_bits": 4,
        "scale_dtype": "torch.uint8",
        "strategy": "group",
        "symmetric": True,
        "type": "float",
        "zp_dtype": None,
    }
    group = {"format": "mxfp4-pack-quantized", "input_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "model_type": "kimi_linear",
        "hidden_act": "situ",
        "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_layer_freq": 1,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 1_048_576,
        "quantization_config": {
            "config_groups": {"group_0": group},
            "format": "mxfp4-pack-quantized",
            "kv_cache_scheme": None,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        },
    }


def _sizes(spec: SyntheticSpec) -> dict[str, object]:
    """The fields that differ between models, in the file's names; its layer lists are one-based."""
    same_name = (
        "num_hidden_layers hidden_size vocab_size intermediate_size first_k_dense_replace attn_res_block_size "
        "num_attention_heads q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim num_experts "
        "num_experts_per_token num_shared_experts routed_expert_hidden_size moe_intermediate_size "
        "routed_scaling_factor moe_renormalize latent_moe_use_norm rms_norm_eps"
    )
    full = spec.full_attention_layers
    return {
        **{name: getattr(spec, name) for name in same_name.split()},
        "num_key_value_heads": spec.num_attention_heads,
        "activation_situ_beta": spec.situ_beta,
        "activation_situ_linear_beta": spec.situ_linear_beta,
        "linear_attn_config": {
            "full_attn_layers": [layer + 1 for layer in full],
            "kda_layers": [layer + 1 for layer in range(spec.num_hidden_layers) if layer not in full],
            "num_heads": spec.kda_num_heads,
            "head_dim": spec.kda_head_dim,
            "short_conv_kernel_size": spec.conv_kernel_size,
            "gate_lower_bound": spec.gate_lower_bound,
            "use_full_rank_gate": True,
        },
    }
