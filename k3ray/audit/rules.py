"""Which tensors a config asks for, how many and of which shape: the text model's table, and the vision tower's.

The vision rules are ours, read from config.json's vision_config and the released names; a run never uses them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from k3ray.workers.checkpoint import shapes
from k3ray.workers.checkpoint.header import DTYPE_BITS
from k3ray.workers.checkpoint.names import PLACE
from k3ray.workers.checkpoint.shapes import TensorType
from k3ray.workers.model.config import ModelConfig

TEXT, ROUTED, VISION, PROJECTOR = "text", "routed experts", "vision", "projector"
_VISION_FIELDS = (
    "vt_num_hidden_layers",
    "vt_hidden_size",
    "vt_intermediate_size",
    "qkv_hidden_size",
    "patch_size",
    "init_pos_emb_height",
    "init_pos_emb_width",
    "mm_hidden_size",
    "text_hidden_size",
)
# Another value of these is another tower, for which there are no rules here.
_VISION_VALUES = {
    "mm_projector_type": "patchmergerv2",
    "mlp_type": "mlp2",
    "norm_type": "rmsnorm",
    "attn_bias": False,
    "linear_bias": False,
    "patch_embed_proj_bias": False,
}


@dataclass(frozen=True, slots=True)
class Rule:
    """Tensors of one name template, dtype and shape. layers: zero-based, or None outside the layers.

    each: how many a layer has (or how many there are, outside the layers).
    """

    template: str
    where: str
    tensor: TensorType
    layers: tuple[int, ...] | None
    each: int

    @property
    def entries(self) -> int:
        """How many tensors there are in all."""
        return self.each * (1 if self.layers is None else len(self.layers))

    @property
    def tensor_bytes(self) -> int:
        """Bytes of one of them."""
        return tensor_bytes(*self.tensor)

    @property
    def elements(self) -> int:
        """Numbers in one of them."""
        return math.prod(self.tensor[1])


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor; only of dtypes that safetensors has."""
    return math.prod(shape) * DTYPE_BITS[dtype] // 8


def text_rules(config: ModelConfig, prefix: str) -> tuple[Rule, ...]:
    """The text model's tensors."""
    places: dict[tuple[str, TensorType], list[int]] = {}
    for layer in range(config.num_hidden_layers):
        for short, tensor in shapes.layer_tensors(config, layer).items():
            places.setdefault((f"{prefix}layers.{PLACE}.{short}", tensor), []).append(layer)
    rules = [Rule(template, TEXT, tensor, tuple(layers), 1) for (template, tensor), layers in places.items()]
    inside = f"{prefix}layers.{PLACE}.{shapes.EXPERTS}{PLACE}."
    for short, tensor in shapes.expert_tensors(config).items():
        rules.append(Rule(inside + short, ROUTED, tensor, tuple(config.moe_layers), config.num_experts))
    for short, tensor in shapes.top_tensors(config).items():
        rules.append(Rule(shapes.top_name(prefix, short), TEXT, tensor, None, 1))
    return tuple(rules)


def vision_rules(root: dict[str, Any]) -> tuple[Rule, ...]:
    """The tensors of the vision tower and the projector; none where the config describes no tower known here."""
    vision = root.get("vision_config")
    if not isinstance(vision, dict):
        return ()
    sizes = {name: vision.get(name) for name in _VISION_FIELDS}
    merge = vision.get("merge_kernel_size")
    whole = all(type(size) is int and 0 < size < 2**24 for size in sizes.values())
    known = all(vision.get(name) == value for name, value in _VISION_VALUES.items())
    if not whole or not known or not isinstance(merge, list) or not all(type(side) is int for side in merge):
        return ()
    return tuple(_vision_rules({name: int(size or 0) for name, size in sizes.items()}, math.prod(merge)))


def _vision_rules(sizes: dict[str, int], merged: int) -> Iterator[Rule]:
    """merged: patches that the projector makes one of."""
    width, inner, attention = sizes["vt_hidden_size"], sizes["vt_intermediate_size"], sizes["qkv_hidden_size"]
    blocks, patch = sizes["vt_num_hidden_layers"], sizes["patch_size"]
    block = f"vision_tower.encoder.blocks.{PLACE}."
    for name, shape in (
        ("norm0.weight", (width,)),
        ("norm1.weight", (width,)),
        ("wqkv.weight", (3 * attention, width)),
        ("wo.weight", (width, attention)),
        ("mlp.fc0.weight", (inner, width)),
        ("mlp.fc1.weight", (width, inner)),
    ):
        yield Rule(block + name, VISION, ("BF16", shape), None, blocks)
    positions = (sizes["init_pos_emb_height"], sizes["init_pos_emb_width"], width)
    yield Rule("vision_tower.patch_embed.proj.weight", VISION, ("BF16", (width, 3, patch, patch)), None, 1)
    yield Rule("vision_tower.patch_embed.pos_emb.weight", VISION, ("BF16", positions), None, 1)
    yield Rule("vision_tower.encoder.final_layernorm.weight", VISION, ("BF16", (width,)), None, 1)
    merged_width, text = sizes["mm_hidden_size"] * merged, sizes["text_hidden_size"]
    # one rule for each dtype and shape: a small model's two projections may be of one
    for rows in dict.fromkeys((merged_width, text)):
        numbers = tuple(number for number, height in ((0, merged_width), (2, text)) if height == rows)
        yield Rule(f"mm_projector.proj.{PLACE}.weight", PROJECTOR, ("BF16", (rows, merged_width)), numbers, 1)
    yield Rule("mm_projector.post_norm.weight", PROJECTOR, ("BF16", (text,)), None, 1)
