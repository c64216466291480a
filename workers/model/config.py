"""The text model's sizes and switches as the checkpoint's config.json states them: no defaults, no guesses.

Docs: MODEL.md "Sizes". Layer numbers in this record are zero-based; the file's lists are one-based.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from k3ray.workers.model.config_document import ConfigDocument, ConfigError, show
from k3ray.workers.model.config_rules import MXFP4_GROUP, check_quantisation, check_released, read_layer_lists
from k3ray.workers.model.config_without_effect import WITHOUT_EFFECT

__all__ = ["ConfigError", "ModelConfig", "read_config", "unknown_fields", "unknown_line"]

MAX_SIZE = 2**24  # no width, head count or vocabulary comes near it; products of two still fit 64 bits
MAX_LAYERS = 4096
MAX_LISTED = 8
MAX_EXPERTS = 2**16


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of one text model, in the field names of the released config where it has one."""

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    rms_norm_eps: float
    eos_token_id: tuple[int, ...]  # the file may hold one id or a list
    intermediate_size: int  # of the dense layers
    first_k_dense_replace: int
    attn_res_block_size: int
    kda_num_heads: int
    kda_head_dim: int
    conv_kernel_size: int
    gate_lower_bound: float  # negative
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int  # never rotated
    v_head_dim: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    routed_expert_hidden_size: int  # the latent the routed experts work in
    moe_intermediate_size: int
    routed_scaling_factor: float
    moe_renormalize: bool
    latent_moe_use_norm: bool
    situ_beta: float
    situ_linear_beta: float
    mla_layers: tuple[int, ...]
    kda_layers: tuple[int, ...]

    @property
    def latent_norm_eps(self) -> float:
        """eps of q_a_layernorm and kv_a_layernorm: the official code builds them with its own 1e-6 (MODEL.md)."""
        return 1e-6

    @property
    def kda_width(self) -> int:
        """Heads times head size of a KDA layer: the width of its q, k, v and gate."""
        return self.kda_num_heads * self.kda_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        """Inner width of the one MLP that stands for all shared experts."""
        return self.moe_intermediate_size * self.num_shared_experts

    @property
    def moe_layers(self) -> range:
        """The zero-based layers that route."""
        return range(min(self.first_k_dense_replace, self.num_hidden_layers), self.num_hidden_layers)

    def is_mla(self, layer: int) -> bool:
        """Whether the zero-based layer attends with MLA; the others are KDA."""
        return layer in self.mla_layers

    def is_moe(self, layer: int) -> bool:
        """Whether the zero-based layer routes; the others have the dense MLP."""
        return layer in self.moe_layers

    def truncated(self, layers: int) -> ModelConfig:
        """The same model cut after its first `layers` layers; raises ConfigError outside 1..num_hidden_layers."""
        if not 1 <= layers <= self.num_hidden_layers:
            expected = f"a number of layers from 1 to {self.num_hidden_layers}"
            raise ConfigError(Path("config.json"), [f"num_hidden_layers: found {layers}, expected {expected}"])
        return replace(
            self,
            num_hidden_layers=layers,
            mla_layers=tuple(layer for layer in self.mla_layers if layer < layers),
            kda_layers=tuple(layer for layer in self.kda_layers if layer < layers),
        )


# (field of the record, key in the file, lies under linear_attn_config, largest value); all of them start at 1
_SIZES: tuple[tuple[str, str, bool, int], ...] = (
    ("hidden_size", "hidden_size", False, MAX_SIZE),
    ("num_hidden_layers", "num_hidden_layers", False, MAX_LAYERS),
    ("vocab_size", "vocab_size", False, MAX_SIZE),
    ("intermediate_size", "intermediate_size", False, MAX_SIZE),
    ("attn_res_block_size", "attn_res_block_size", False, MAX_LAYERS),
    ("kda_num_heads", "num_heads", True, MAX_SIZE),
    ("kda_head_dim", "head_dim", True, MAX_SIZE),
    ("conv_kernel_size", "short_conv_kernel_size", True, 1024),
    ("num_attention_heads", "num_attention_heads", False, MAX_SIZE),
    ("q_lora_rank", "q_lora_rank", False, MAX_SIZE),
    ("kv_lora_rank", "kv_lora_rank", False, MAX_SIZE),
    ("qk_nope_head_dim", "qk_nope_head_dim", False, MAX_SIZE),
    ("qk_rope_head_dim", "qk_rope_head_dim", False, MAX_SIZE),
    ("v_head_dim", "v_head_dim", False, MAX_SIZE),
    ("num_experts", "num_experts", False, MAX_EXPERTS),
    ("num_experts_per_token", "num_experts_per_token", False, MAX_EXPERTS),
    ("routed_expert_hidden_size", "routed_expert_hidden_size", False, MAX_SIZE),
    ("moe_intermediate_size", "moe_intermediate_size", False, MAX_SIZE),
)
_POSITIVE: tuple[tuple[str, str], ...] = (
    ("rms_norm_eps", "rms_norm_eps"),
    ("routed_scaling_factor", "routed_scaling_factor"),
    ("situ_beta", "activation_situ_beta"),
    ("situ_linear_beta", "activation_situ_linear_beta"),
)


def read_config(path: Path) -> ModelConfig:
    """The config in `path`, a config.json or the directory that holds one; raises ConfigError with every problem."""
    return _read(ConfigDocument(path))


def unknown_fields(path: Path) -> tuple[str, ...]:
    """The dotted names of a valid config's fields that nothing here reads or knows to be without effect.

    Such a field may select another model: whoever runs this one has to hear of it. Raises ConfigError.
    """
    document = ConfigDocument(path)
    _read(document)
    return document.unasked(WITHOUT_EFFECT)


def unknown_line(path: Path) -> str:
    """What is said of unknown_fields; empty where there are none."""
    names = unknown_fields(path)
    if not names:
        return ""
    listed = ", ".join(names[:MAX_LISTED]) + (f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else "")
    return f"config.json has fields that are not known here and not used: {listed}: one may mean another model"


def _read(document: ConfigDocument) -> ModelConfig:
    values: dict[str, Any] = {name: document.whole(key, 1, high, kda=kda) for name, key, kda, high in _SIZES}
    layers = values["num_hidden_layers"]
    values["first_k_dense_replace"] = document.whole("first_k_dense_replace", 0, layers or MAX_LAYERS)
    values["num_shared_experts"] = document.whole("num_shared_experts", 0, MAX_EXPERTS)
    values |= {name: document.real(key, 0.0) for name, key in _POSITIVE}
    values["gate_lower_bound"] = document.real("gate_lower_bound", -1e30, 0.0, kda=True)
    values |= {key: document.flag(key) for key in ("moe_renormalize", "latent_moe_use_norm")}
    values["eos_token_id"] = _read_eos(document, values["vocab_size"])
    _check_relations(document, values)
    check_released(document)
    check_quantisation(document)
    lists = read_layer_lists(document, layers)
    document.raise_problems()
    assert lists is not None  # None always comes with a problem
    values["mla_layers"], values["kda_layers"] = lists
    return ModelConfig(**values)


def _read_eos(document: ConfigDocument, vocab: int | None) -> tuple[int, ...] | None:
    """The end-of-message ids: one whole number or a list of them, each inside the vocabulary."""
    expected = f"a token id below {vocab or MAX_SIZE}, or a list of them"
    value = document.value("eos_token_id", expected=expected)
    ids = value if isinstance(value, list) else [value]
    if value is None:
        return None
    if ids and all(type(item) is int and 0 <= item < (vocab or MAX_SIZE) for item in ids):
        return tuple(dict.fromkeys(ids))
    document.note(document.field("eos_token_id"), show(value), expected)
    return None


def _check_relations(document: ConfigDocument, values: dict[str, Any]) -> None:
    """Note what no field shows alone: top-k above the experts, key heads unlike query heads, widths unfit for MXFP4."""
    top_k, experts = values["num_experts_per_token"], values["num_experts"]
    if top_k is not None and experts is not None and top_k > experts:
        expected = f"at most num_experts = {experts}"
        document.note(document.field("num_experts_per_token"), show(top_k), expected)
    heads = values["num_attention_heads"]
    key_heads = document.whole("num_key_value_heads", 1, MAX_SIZE)
    if heads is not None and key_heads is not None and heads != key_heads:
        document.note(document.field("num_key_value_heads"), show(key_heads), f"num_attention_heads = {heads}")
    for key in ("routed_expert_hidden_size", "moe_intermediate_size"):
        if values[key] is not None and values[key] % MXFP4_GROUP:
            expected = f"a multiple of {MXFP4_GROUP}, the columns of one MXFP4 scale"
            document.note(document.field(key), show(values[key]), expected)
