"""Binds what one process needs of a model to folders that may each hold a part of it: all of that, and nothing else.

A tensor may be in any of the folders; an expert is whole in one of them, so that it is read at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from k3ray.workers.checkpoint import shapes
from k3ray.workers.checkpoint.binding import MAX_LISTED, Binder, BindError, Binding, find_prefix
from k3ray.workers.checkpoint.header_json import show_name
from k3ray.workers.checkpoint.index_table import TensorIndex
from k3ray.workers.checkpoint.names import PLACE, numbers_of
from k3ray.workers.checkpoint.shapes import TensorType
from k3ray.workers.model.config import ModelConfig

Mask = npt.NDArray[np.bool_]
EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class ModelPart:
    """What a process needs. layers: everything of them but their routed experts. embedding, head: the head with the
    last norms. experts: (num_experts,) bool by layer.
    """

    layers: range = range(0)
    embedding: bool = False
    head: bool = False
    experts: Mapping[int, Mask] = field(default_factory=dict)


def bind_part(config: ModelConfig, indices: Sequence[TensorIndex], part: ModelPart) -> Binding:
    """Bind a part to the folders' indices; BindError names what is in none of them or has another dtype or shape."""
    where = ", ".join(str(index.directory) for index in indices)
    prefixes = {find_prefix(index) for index in indices}
    if len(prefixes) > 1:
        problem = f"found names below {' and below '.join(sorted(prefixes))}, expected one prefix in all folders"
        raise BindError(where, [problem], 1, "Name folders with the shards of one conversion.")
    prefix = prefixes.pop()
    binders = [Binder(config, index, prefix) for index in indices]
    for binder in binders:
        binder.refuse_unused_parts()
    missing = _bind_named(config, binders, prefix, part) + _bind_experts(config, binders, prefix, part)
    problems = [problem for binder in binders for problem in binder.problems] + missing[:MAX_LISTED]
    count = sum(binder.count for binder in binders) + len(missing)
    if count:
        advice = "Copy the shards with these tensors to one of the node's folders, or plan with what it has."
        raise BindError(where, problems[:MAX_LISTED], count, advice)
    bound: dict[str, int] = {}
    for binder in binders:
        for short, number in binder.bound.items():
            bound[short] = bound.get(short, 0) + number
    return Binding(config, prefix, bound, {}, all(index.has_shapes for index in indices))


def needed_tensors(config: ModelConfig, prefix: str, part: ModelPart) -> dict[str, tuple[str, TensorType]]:
    """Full name -> (short name, dtype and shape) of everything in a part but routed experts."""
    top = {
        shapes.top_name(prefix, short): (short, expected)
        for short, expected in shapes.top_tensors(config).items()
        if (part.embedding if short == EMBEDDING else part.head)
    }
    return top | {
        shapes.layer_name(prefix, layer, short): (short, expected)
        for layer in part.layers
        for short, expected in shapes.layer_tensors(config, layer).items()
    }


def whole_experts(config: ModelConfig, index: TensorIndex, prefix: str) -> Mask:
    """Which experts have all their tensors in an index, whatever their shape: (layers of the model, experts) bool."""
    experts = config.num_experts
    whole = np.ones((config.num_hidden_layers, experts), dtype=bool)
    for short in shapes.expert_tensors(config):
        here = np.zeros_like(whole)
        layer, expert = numbers_of(index.columns.keys[index.rows_of(_template(prefix, short))])
        known = (layer < len(here)) & (expert < experts)
        here[layer[known], expert[known]] = True
        whole &= here
    return whole


def _template(prefix: str, short: str) -> str:
    return f"{prefix}layers.{PLACE}.{shapes.EXPERTS}{PLACE}.{short}"


def _bind_named(config: ModelConfig, binders: Sequence[Binder], prefix: str, part: ModelPart) -> list[str]:
    """Bind each tensor in every folder that has it, so that a wrong copy is found; returns what none of them has."""
    missing = []
    for name, (short, expected) in needed_tensors(config, prefix, part).items():
        holders = [binder for binder in binders if binder.index.row(name) is not None]
        for binder in holders:
            binder.bind_one(short, name, expected)
        if not holders:
            dtype, shape = expected
            missing.append(f"{show_name(name)}: in none of the folders, expected {dtype} {list(shape)}")
    return missing


def _bind_experts(config: ModelConfig, binders: Sequence[Binder], prefix: str, part: ModelPart) -> list[str]:
    """The same for experts, all at once."""
    if not part.experts:
        return []
    wanted = np.zeros((config.num_hidden_layers, config.num_experts), dtype=bool)
    for layer, mask in part.experts.items():
        wanted[layer] = mask
    found = np.zeros_like(wanted)
    for binder in binders:
        binder.refuse_unpacked_experts()
        found |= whole_experts(config, binder.index, prefix)
        for short, expected in shapes.expert_tensors(config).items():
            rows = binder.index.rows_of(_template(prefix, short))
            layers, experts = numbers_of(binder.index.columns.keys[rows])
            known = (layers < len(wanted)) & (experts < config.num_experts)
            known[known] = wanted[layers[known], experts[known]]
            wrong = binder.wrong_kinds(rows, known, expected)
            for row in wrong.tolist():
                binder.note_wrong(row, expected)
            if known.any():
                binder.bound[shapes.EXPERTS + short] = int(known.sum()) - len(wrong)
    lacking = np.argwhere(wanted & ~found).tolist()
    return [f"layer {layer} expert {expert}: whole in none of the folders" for layer, expert in lacking]
