"""The checkpoint's tensors counted by kind and by layer, each beside what the rules say. Knows no values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from k3ray.audit.artifact import Artifact
from k3ray.audit.rules import PROJECTOR, ROUTED, TEXT, VISION, Rule, tensor_bytes, text_rules, vision_rules
from k3ray.audit.snapshot import KindRow, LayerRow, Letter
from k3ray.workers.checkpoint import shapes
from k3ray.workers.checkpoint.header import DTYPE_BITS
from k3ray.workers.checkpoint.names import PLACE, numbers_of
from k3ray.workers.checkpoint.shapes import TensorType

UNKNOWN: TensorType = ("", ())
OTHER = "other"
_STARTS = (("vision_tower.", VISION), ("vision_model.", VISION), ("mm_projector.", PROJECTOR))


@dataclass(frozen=True, slots=True)
class Rules:
    """All rules of one config, text and vision, and the same by template."""

    text: tuple[Rule, ...]
    vision: tuple[Rule, ...]

    @property
    def all(self) -> tuple[Rule, ...]:
        """Text and vision."""
        return (*self.text, *self.vision)

    def of(self, template: str) -> list[Rule]:
        """The rules of one template."""
        return [rule for rule in self.all if rule.template == template]


def rules_of(artifact: Artifact) -> Rules:
    """The rules of an artifact's config."""
    return Rules(text_rules(artifact.config, artifact.prefix), vision_rules(artifact.root))


def count_kinds(artifact: Artifact, rules: Rules) -> tuple[KindRow, ...]:
    """A row for every template, dtype and shape, in the order of their names; also for those that are missing."""
    rows: list[KindRow] = []
    for template, count in artifact.index.templates().items():
        if count:
            rows += _rows_of(artifact, rules, template)
    present = {row.kind for row in rows}
    rows += [_row(artifact, rule, 0, *rule.tensor, rule) for rule in rules.text if rule.template not in present]
    return tuple(sorted(rows, key=lambda row: (row.where != TEXT, row.where, row.kind, row.dtype, row.shape)))


def _rows_of(artifact: Artifact, rules: Rules, template: str) -> Iterator[KindRow]:
    """The rows of one template: what is there by dtype and shape, then what the rules ask for and is not there."""
    ruled = rules.of(template)
    counts = _typed_counts(artifact, template, ruled)
    unmet = {rule.tensor: rule for rule in ruled}
    for (dtype, shape), count in counts.items():
        rule = unmet.pop((dtype, shape), None)
        if rule is None and template.endswith(f".{shapes.A_LOG}") and _holds_heads(artifact, dtype, shape):
            rule = unmet.pop(next(iter(unmet), UNKNOWN), None)  # one of the other accepted layouts
        known = ruled[0].where if ruled else _where(artifact, template)
        yield _row(artifact, rule, count, dtype, shape, ruled[0] if ruled else None, template, known)
    for rule in unmet.values():
        if rule.where in (TEXT, ROUTED):
            yield _row(artifact, rule, 0, *rule.tensor, rule)


def _typed_counts(artifact: Artifact, template: str, ruled: list[Rule]) -> dict[TensorType, int]:
    """How many tensors of a template have which dtype and shape: the headers', or the rules' where names are all."""
    index = artifact.index
    rows = index.rows_of(template)
    if index.has_shapes:
        ids, counts = np.unique(index.columns.kind_ids[rows], return_counts=True)
        return _merged(
            ((index.kinds[number].dtype, index.kinds[number].shape), count)
            for number, count in zip(ids.tolist(), counts.tolist(), strict=True)
        )
    first, second = numbers_of(index.columns.keys[rows])
    left = np.ones(len(first), dtype=np.bool_)
    counted: list[tuple[TensorType, int]] = []
    for rule in ruled:
        taken = left & (np.isin(first, rule.layers) if rule.layers is not None else True)
        if rule.where == ROUTED:
            taken &= second < rule.each
        counted.append((rule.tensor, int(np.count_nonzero(taken))))
        left &= ~taken
    counted.append((UNKNOWN, int(np.count_nonzero(left))))
    return _merged(pair for pair in counted if pair[1])


def _merged(pairs: Iterator[tuple[TensorType, int]]) -> dict[TensorType, int]:
    counts: dict[TensorType, int] = {}
    for tensor, count in pairs:
        counts[tensor] = counts.get(tensor, 0) + count
    return counts


def _row(
    artifact: Artifact,
    rule: Rule | None,
    count: int,
    dtype: str,
    shape: tuple[int, ...],
    near: Rule | None,
    template: str = "",
    where: str = "",
) -> KindRow:
    """rule: the one that this dtype and shape meets. near: a rule of the same template, met or not."""
    known = dtype in DTYPE_BITS
    note = ""
    if near is not None and rule is None:
        note = f"the rules say {near.tensor[0]} {list(near.tensor[1])}" if dtype else "no rule names these layers"
    elif rule is not None and rule.template.endswith(f".{shapes.A_LOG}") and shape != (artifact.config.kda_num_heads,):
        note = f"{artifact.config.kda_num_heads} heads in the config: see a_log.shape"
    elif near is None:
        note = "left alone by the text model"
    letter: Letter = "O" if artifact.index.has_shapes and count else "D"
    expected = rule.entries if rule is not None else 0 if near is not None else None
    return KindRow(
        kind=template or (near.template if near is not None else ""),
        where=where or (near.where if near is not None else OTHER),
        entries=count,
        expected_entries=expected,
        dtype=dtype,
        shape=shape,
        bytes=count * tensor_bytes(dtype, shape) if known else None,
        agrees=None if expected is None else count == expected,
        note=note,
        letter=letter,
    )


def _holds_heads(artifact: Artifact, dtype: str, shape: tuple[int, ...]) -> bool:
    """Whether A_log can hold one value a head in this layout (docs/checkpoint.md "A_log")."""
    heads = artifact.config.kda_num_heads
    return dtype == "F32" and (shape == (1, 1, heads, 1) or (len(shape) == 1 and shape[0] >= heads))


def _where(artifact: Artifact, template: str) -> str:
    for start, where in _STARTS:
        if template.startswith(start):
            return where
    return TEXT if template.startswith(artifact.prefix) else OTHER


def count_layers(artifact: Artifact, rules: Rules) -> tuple[LayerRow, ...]:
    """A row for every layer of the config: its tensors, their bytes and their shards."""
    index, config = artifact.index, artifact.config
    layers = config.num_hidden_layers
    tensors = np.zeros(layers, dtype=np.int64)
    sizes = np.zeros(layers, dtype=np.int64)
    shards = np.zeros((layers, len(index.shards)), dtype=np.bool_)
    kind_bytes = np.array([kind.nbytes for kind in index.kinds], dtype=np.int64)
    for template in index.templates():
        if not template.startswith(f"{artifact.prefix}layers.{PLACE}."):
            continue
        rows = index.rows_of(template)
        numbers, _ = numbers_of(index.columns.keys[rows])
        inside = (numbers >= 0) & (numbers < layers)
        numbers = numbers[inside]
        np.add.at(tensors, numbers, 1)
        shards[numbers, index.columns.shard_ids[rows][inside]] = True
        if index.has_shapes:
            np.add.at(sizes, numbers, kind_bytes[index.columns.kind_ids[rows][inside]])
        else:
            np.add.at(sizes, numbers, _ruled_bytes(rules.of(template), numbers))
    return tuple(
        LayerRow(
            layer=layer,
            attention="MLA" if config.is_mla(layer) else "KDA",
            feed_forward="MoE" if config.is_moe(layer) else "dense",
            attnres_block=layer // config.attn_res_block_size,
            tensors=int(tensors[layer]),
            bytes=int(sizes[layer]),
            shards=tuple(shard.name for shard, here in zip(index.shards, shards[layer], strict=True) if here),
            letter="O" if index.has_shapes else "D",
        )
        for layer in range(layers)
    )


def _ruled_bytes(ruled: list[Rule], layers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Bytes of one tensor in each of the layers, 0 where no rule names the layer."""
    sizes = np.zeros(len(layers), dtype=np.int64)
    for rule in ruled:
        sizes[np.isin(layers, rule.layers if rule.layers is not None else ())] = rule.tensor_bytes
    return sizes
