"""The layer map's statements: which layers there are by their names, against what the config says of them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from k3ray.audit.artifact import Artifact
from k3ray.audit.claims import compared, ranges, said
from k3ray.audit.snapshot import LayerRow, Statement
from k3ray.workers.checkpoint import shapes
from k3ray.workers.checkpoint.names import PLACE, numbers_of

_SHARD_NUMBER = re.compile(r"-(\d+)-of-\d+\.safetensors$")
_NAMES = "names of the tensors against config.json"


def layer_statements(artifact: Artifact, rows: Sequence[LayerRow]) -> list[Statement]:
    """Everything that is said about the layers."""
    return [
        _count(artifact),
        _attention(artifact),
        _lists(artifact),
        _feed_forward(artifact),
        _blocks(artifact),
        _tensors(artifact, rows),
        _shards(artifact, rows),
        _shards_without_layers(artifact, rows),
    ]


def layers_with(artifact: Artifact, short: str) -> set[int]:
    """The layers that have a tensor of this short name."""
    rows = artifact.index.rows_of(f"{artifact.prefix}layers.{PLACE}.{short}")
    return set(numbers_of(artifact.index.columns.keys[rows])[0].tolist())


def _count(artifact: Artifact) -> Statement:
    numbers: set[int] = set()
    for template in artifact.index.templates():
        if template.startswith(f"{artifact.prefix}layers.{PLACE}."):
            keys = artifact.index.columns.keys[artifact.index.rows_of(template)]
            numbers |= set(np.unique(numbers_of(keys)[0]).tolist())
    expected = set(range(artifact.config.num_hidden_layers))
    return compared("layers.count", "layers", "O", "layers, zero-based", _layers(numbers), _layers(expected), _NAMES)


def _layers(numbers: set[int]) -> str:
    return f"{len(numbers)}: {ranges(numbers)}"


def _two(first: str, one: set[int], second: str, other: set[int]) -> str:
    return f"{len(one)} {first}, {len(other)} {second} ({second}: {ranges(other)})"


def _attention(artifact: Artifact) -> Statement:
    config = artifact.config
    found = _two(
        "KDA", layers_with(artifact, shapes.A_LOG), "MLA", layers_with(artifact, "self_attn.kv_a_proj_with_mqa.weight")
    )
    expected = _two("KDA", set(config.kda_layers), "MLA", set(config.mla_layers))
    subject = "layers by attention, zero-based"
    return compared("layers.attention", "layers", "O", subject, found, expected, _NAMES, main=True)


def _lists(artifact: Artifact) -> Statement:
    config = artifact.config
    one_based = ranges(layer + 1 for layer in config.mla_layers)
    found = f"full_attn_layers {one_based}: with kda_layers each of 1-{config.num_hidden_layers} once"
    subject = "the config's layer lists count from one"
    return said("layers.one_based", "layers", "O", subject, found, "config.json, read as a one-based partition")


def _feed_forward(artifact: Artifact) -> Statement:
    config = artifact.config
    dense = set(range(config.num_hidden_layers)) - set(config.moe_layers)
    found = _two(
        "MoE", layers_with(artifact, "block_sparse_moe.gate.weight"),
        "dense", layers_with(artifact, "mlp.gate_proj.weight"),
    )  # fmt: skip
    expected = _two("MoE", set(config.moe_layers), "dense", dense)
    subject = "layers by feed-forward part, zero-based"
    return compared("layers.feed_forward", "layers", "O", subject, found, expected, _NAMES)


def _blocks(artifact: Artifact) -> Statement:
    layers, size = artifact.config.num_hidden_layers, artifact.config.attn_res_block_size
    blocks = -(-layers // size)
    last = layers - (blocks - 1) * size
    found = f"{blocks} blocks of {size} layers (the last of {last}); the bank grows to {blocks} rows"
    return said("layers.attnres", "layers", "D", "AttnRes blocks", found, "config.json attn_res_block_size")


def _tensors(artifact: Artifact, rows: Sequence[LayerRow]) -> Statement:
    config = artifact.config
    whole, wrong = 0, []
    for row in rows:
        table = shapes.layer_tensors(config, row.layer)
        expert = shapes.expert_tensors(config) if config.is_moe(row.layer) else {}
        if row.tensors == len(table) + config.num_experts * len(expert):
            whole += 1
        else:
            wrong.append(row.layer)
    found = f"{whole} of {len(rows)}" + (f"; not layers {ranges(wrong)}" if wrong else "")
    subject = "layers with as many tensors as the rules ask for"
    return compared("layers.tensors", "layers", "O", subject, found, f"{len(rows)} of {len(rows)}", _NAMES)


def _shards(artifact: Artifact, rows: Sequence[LayerRow]) -> Statement:
    alone = [row for row in rows if len(row.shards) == 1]
    numbers = [_SHARD_NUMBER.search(row.shards[0]) for row in alone]
    next_one = sum(
        match is not None and int(match[1]) == row.layer + 1 for match, row in zip(numbers, alone, strict=True)
    )
    found = f"{len(alone)} of {len(rows)} lie in one shard each; {next_one} of them in the shard numbered layer + 1"
    where = "the headers" if artifact.index.has_shapes else "the index file"
    return said("layers.shards", "layers", "O", "where a layer's tensors lie", found, where)


def _shards_without_layers(artifact: Artifact, rows: Sequence[LayerRow]) -> Statement:
    """What lies in the shards that hold no layer, by the first parts of the names."""
    index = artifact.index
    layered = {name for row in rows for name in row.shards}
    held: dict[str, list[str]] = {}
    for template in index.templates():
        start = ".".join(template.removeprefix("language_model.").split(".")[:2]).removesuffix(".weight")
        for shard in np.unique(index.columns.shard_ids[index.rows_of(template)]).tolist():
            name = index.shards[shard].name
            if name not in layered and start not in held.setdefault(name, []):
                held[name].append(start)
    found = "; ".join(f"{name}: {', '.join(sorted(starts))}" for name, starts in sorted(held.items()))
    where = "the headers" if index.has_shapes else "the index file"
    return said("layers.other_shards", "layers", "O", "what the shards without layers hold", found or "none", where)
