"""Binds a checkpoint to the text model: every tensor the config asks for is there, in its dtype and exact shape, once.

Knows names, dtypes and shapes, no values (a_log.py reads those that prove a layout). Docs: CHECKPOINT.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from k3ray.workers.checkpoint import shapes
from k3ray.workers.checkpoint.a_log import is_a_log_shape
from k3ray.workers.checkpoint.header_json import show_name
from k3ray.workers.checkpoint.index_table import TensorIndex
from k3ray.workers.checkpoint.leftovers import count_left
from k3ray.workers.checkpoint.names import PLACE, numbers_of
from k3ray.workers.checkpoint.shapes import TensorType
from k3ray.workers.counted import counted
from k3ray.workers.failure import Failure
from k3ray.workers.model.config import ModelConfig

MAX_LISTED = 20
PREFIXES = (shapes.RELEASED_PREFIX, shapes.CONVERTED_PREFIX)


class BindError(Failure):
    """The checkpoint is not the model that its config describes; lists the first problems and counts all."""

    exit_code = 1

    def __init__(self, directory: Path | str, problems: list[str], count: int, advice: str) -> None:
        self.problems = tuple(problems)
        self.count = count
        listed = "".join(f"\n  {problem}" for problem in problems[:MAX_LISTED])
        more = f"\n  and {count - MAX_LISTED} more" if count > MAX_LISTED else ""
        super().__init__(f"{directory}: {counted(count, 'problem')} binding the text model:{listed}{more}\n{advice}")


@dataclass(frozen=True, slots=True)
class Binding:
    """A checkpoint whose every tensor of the text model is proven; names are made on demand.

    bound: tensors of each short kind; left: what the text model does not use, by kind. shapes_checked is False when
    only names were known.
    """

    config: ModelConfig
    prefix: str
    bound: dict[str, int]
    left: dict[str, int]
    shapes_checked: bool

    @property
    def top(self) -> dict[str, str]:
        """Full names of the tensors outside the layers, by short name."""
        return {short: shapes.top_name(self.prefix, short) for short in shapes.top_tensors(self.config)}

    @property
    def num_bound(self) -> int:
        """How many tensors are bound."""
        return sum(self.bound.values())

    @property
    def num_left(self) -> int:
        """How many tensors of the checkpoint the text model does not use."""
        return sum(self.left.values())

    def layer_tensors(self, layer: int) -> dict[str, str]:
        """Full names of a layer's tensors except its routed experts, by short name."""
        return {
            short: shapes.layer_name(self.prefix, layer, short) for short in shapes.layer_tensors(self.config, layer)
        }

    def expert_tensors(self, layer: int, expert: int) -> dict[str, str]:
        """Full names of one routed expert's six tensors, by short name such as `w1.weight_packed`."""
        return {
            short: shapes.expert_name(self.prefix, layer, expert, short) for short in shapes.expert_tensors(self.config)
        }


def bind(config: ModelConfig, index: TensorIndex) -> Binding:
    """Bind a checkpoint to its config, or raise BindError with every kind of problem found.

    On an index of names alone only the presence is proven.
    """
    prefix = find_prefix(index)
    binder = Binder(config, index, prefix)
    binder.refuse_unpacked_experts()
    binder.refuse_unused_parts()
    for short, expected in shapes.top_tensors(config).items():
        binder.bind_one(short, shapes.top_name(prefix, short), expected)
    for layer in range(config.num_hidden_layers):
        for short, expected in shapes.layer_tensors(config, layer).items():
            binder.bind_one(short, shapes.layer_name(prefix, layer, short), expected)
    for short, expected in shapes.expert_tensors(config).items():
        binder.bind_experts(short, expected)
    if binder.count:
        advice = "Use the config.json that belongs to these shards, or fetch the shards that are missing or wrong."
        raise BindError(index.directory, binder.problems, binder.count, advice)
    left = count_left(config, index, prefix, binder.bound)
    return Binding(config, prefix, binder.bound, left, index.has_shapes)


def find_prefix(index: TensorIndex) -> str:
    """The one prefix of the text model's names; raises BindError when there is none or both occur."""
    examples: dict[str, str] = {}
    for template in index.templates():
        for prefix in PREFIXES:
            below = template.removeprefix(prefix) if template.startswith(prefix) else ""
            head = shapes.top_name(prefix, shapes.LM_HEAD)
            if below.startswith(f"layers.{PLACE}.") or below in _TOP or template == head:
                examples.setdefault(prefix, template)
    if len(examples) == 1:
        return next(iter(examples))
    if examples:
        found = " and ".join(f"{show_name(example)} (below {prefix})" for prefix, example in examples.items())
        problem = f"found {found}, expected one prefix throughout"
        raise BindError(index.directory, [problem], 1, "Keep the shards of one conversion in this folder.")
    some = ", ".join(show_name(template) for template in list(index.templates())[:3]) or "no tensor at all"
    problem = f"bound nothing: found {len(index)} tensors such as {some}, expected names below {' or '.join(PREFIXES)}"
    raise BindError(index.directory, [problem], 1, "Use a checkpoint in the released layout.")


_TOP = ("embed_tokens.weight", "norm.weight", "output_attn_res_norm.weight", "output_attn_res_proj.weight")


class Binder:
    """Collects what is bound and what is wrong while the table of shapes is walked."""

    def __init__(self, config: ModelConfig, index: TensorIndex, prefix: str) -> None:
        self.config = config
        self.index = index
        self.prefix = prefix
        self.bound: dict[str, int] = {}
        self.problems: list[str] = []
        self.count = 0

    def note(self, problem: str, count: int = 1) -> None:
        """Count problems, and keep the text of the first ones."""
        self.count += count
        if len(self.problems) < MAX_LISTED:
            self.problems.append(problem)

    def bind_one(self, short: str, name: str, expected: TensorType) -> None:
        """Bind a tensor outside the routed experts."""
        row = self.index.row(name)
        if row is None:
            self.note(f"{show_name(name)}: not in the checkpoint, expected {_show(expected)}")
            return
        if self.index.has_shapes:
            kind = self.index.kinds[int(self.index.columns.kind_ids[row])]
            right = (kind.dtype, kind.shape) == expected
            if short == shapes.A_LOG:
                right = kind.dtype == "F32" and is_a_log_shape(kind.shape, self.config.kda_num_heads)
            if not right:
                self.note_wrong(row, expected)
                return
        self.bound[short] = self.bound.get(short, 0) + 1

    def bind_experts(self, short: str, expected: TensorType) -> None:
        """Bind one tensor of every routed expert of every MoE layer, routed or never routed."""
        experts, layers = self.config.num_experts, self.config.moe_layers
        rows = self.index.rows_of(f"{self.prefix}layers.{PLACE}.{shapes.EXPERTS}{PLACE}.{short}")
        layer, expert = numbers_of(self.index.columns.keys[rows])
        wanted = (layer >= layers.start) & (layer < layers.stop) & (expert < experts)
        places = (layer[wanted] - layers.start) * experts + expert[wanted]  # ascending, as the keys are
        missing = len(layers) * experts - len(places)
        if missing:
            candidates = np.arange(min(len(layers) * experts, len(places) + MAX_LISTED))
            for place in np.setdiff1d(candidates, places)[:MAX_LISTED].tolist():
                name = shapes.expert_name(self.prefix, layers.start + place // experts, place % experts, short)
                self.note(f"{show_name(name)}: not in the checkpoint, expected {_show(expected)}")
            self.count += max(missing - MAX_LISTED, 0)
        wrong = self.wrong_kinds(rows, wanted, expected)
        for row in wrong[:MAX_LISTED].tolist():
            self.note_wrong(row, expected)
        self.count += max(len(wrong) - MAX_LISTED, 0)
        if len(places):
            self.bound[shapes.EXPERTS + short] = len(places) - len(wrong)

    def wrong_kinds(self, rows: slice, wanted: npt.NDArray[np.bool_], expected: TensorType) -> npt.NDArray[np.int64]:
        """The wanted rows whose dtype or shape is another."""
        if not self.index.has_shapes:
            return np.empty(0, dtype=np.int64)
        right = [number for number, kind in enumerate(self.index.kinds) if (kind.dtype, kind.shape) == expected]
        wrong = wanted & ~np.isin(self.index.columns.kind_ids[rows], right)
        return np.asarray(np.flatnonzero(wrong) + rows.start, dtype=np.int64)

    def refuse_unpacked_experts(self) -> None:
        """Note experts stored as plain matrices, alone or beside packed ones."""
        inside = f"{self.prefix}layers.{PLACE}.{shapes.EXPERTS}"
        known = {f"{inside}{PLACE}.{short}" for short in shapes.expert_tensors(self.config)}
        packed = any(count for template, count in self.index.templates().items() if template in known)
        for template, count in self.index.templates().items():
            if count and template.startswith(inside) and template.endswith(".weight"):
                name = show_name(self.index.name(self.index.rows_of(template).start))
                beside = "a mix of packed and unpacked experts" if packed else "unpacked experts"
                self.note(
                    f"{name}: {beside}, {count} of this kind; expected weight_packed and weight_scale only", count
                )

    def refuse_unused_parts(self) -> None:
        """Note biases, and parts that the config leaves out and the checkpoint has: the sums would be without them."""
        start, config = f"{self.prefix}layers.{PLACE}.", self.config
        bound = {shapes.top_name(self.prefix, short) for short in shapes.top_tensors(config)}
        bound |= {
            start + short for layer in range(config.num_hidden_layers) for short in shapes.layer_tensors(config, layer)
        }
        bound |= {f"{start}{shapes.EXPERTS}{PLACE}.{short}" for short in shapes.expert_tensors(config)}
        optional = tuple(start + part for part in shapes.OPTIONAL_PARTS)
        for template, count in self.index.templates().items():
            stem = template.removesuffix(".bias")
            is_bias = stem != template and not bound.isdisjoint((f"{stem}.weight", f"{stem}.weight_packed"))
            if count and (is_bias or (template.startswith(optional) and template not in bound)):
                name = show_name(self.index.name(self.index.rows_of(template).start))
                what = "a bias" if is_bias else "a part that the config leaves out"
                self.note(f"{name}: found {what}, {count} of this kind; expected none", count)

    def note_wrong(self, row: int, expected: TensorType) -> None:
        """Note a tensor of another dtype or shape."""
        kind = self.index.kinds[int(self.index.columns.kind_ids[row])]
        name, path = show_name(self.index.name(row)), self.index.path(row)
        what = " (transposed)" if kind.shape == expected[1][::-1] != expected[1] else ""
        found = _show((kind.dtype, kind.shape))
        self.note(f"{path.name}: tensor {name}: found {found}{what}, expected {_show(expected)}")


def _show(tensor: TensorType) -> str:
    return f"{tensor[0]} {list(tensor[1])}"
