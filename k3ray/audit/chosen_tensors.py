"""Which small tensors the audit reads, within a share of the files, and their values.

Every KDA layer's A_log; for the chosen layers dt_bias, the router's bias and its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from k3ray.audit.artifact import Artifact, files_at_once
from k3ray.audit.claims import ranges
from k3ray.audit.reading import read_each
from k3ray.workers.checkpoint import shapes
from k3ray.workers.checkpoint.index_table import TensorEntry
from k3ray.workers.failure import Failure
from k3ray.workers.model.config import ModelConfig

DT_BIAS = "self_attn.dt_bias"
ROUTER = "block_sparse_moe.gate.weight"
ROUTER_BIAS = "block_sparse_moe.gate.e_score_correction_bias"
DEFAULT_SHARE = 0.01  # of the files' bytes, all that is fetched included; over a network, and unless layers are named
_DTYPES = ("F32", "BF16")  # of another one, which disagrees, no statistics are made
RECORDED_LAYERS = (1, 2)  # whose values others have recorded

Progress = Callable[[int, int], None]


class LayerChoiceError(Failure):
    """Layers that the checkpoint does not have."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Chosen:
    """One tensor to read."""

    layer: int
    short: str
    entry: TensorEntry


@dataclass(frozen=True, slots=True)
class Values:
    """What was read: values by (layer, short name), float32 or bf16 bits as stored. left_out: for want of bytes."""

    arrays: dict[tuple[int, str], npt.NDArray[Any]]
    left_out: tuple[Chosen, ...]

    def layers_of(self, short: str) -> list[int]:
        """The layers of which a tensor was read."""
        return sorted(layer for layer, name in self.arrays if name == short)

    def widened(self, layer: int, short: str) -> npt.NDArray[np.float64]:
        """A tensor's values, exactly, in double."""
        return widen(self.arrays[layer, short])


def widen(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """float32, or bf16 as its bits, as double: exact."""
    if values.dtype == np.uint16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float64)


def parse_layers(text: str, config: ModelConfig) -> tuple[int, ...]:
    """Zero-based layers from "0-3,17" or "all"; raises LayerChoiceError."""
    last = config.num_hidden_layers - 1
    if text == "all":
        return tuple(range(last + 1))
    layers: set[int] = set()
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        ends = (low, high if dash else low)
        if not all(end.isascii() and end.isdecimal() and len(end) < 9 for end in ends):
            raise LayerChoiceError(f"--layers: found {text!r}, expected layers from 0 to {last}, like 0-3,17, or all")
        first, final = (int(end) for end in ends)
        if not first <= final <= last:
            raise LayerChoiceError(f"--layers: found {part.strip()}, expected layers from 0 to {last}, ascending")
        layers |= set(range(first, final + 1))
    return tuple(sorted(layers))


def default_layers(config: ModelConfig) -> tuple[int, ...]:
    """The layers that others have recorded, the middle and the last."""
    last = config.num_hidden_layers - 1
    return tuple(sorted({layer for layer in (*RECORDED_LAYERS, last // 2, last) if layer <= last}))


def choose_tensors(artifact: Artifact, layers: Sequence[int]) -> list[Chosen]:
    """The tensors worth reading, the cheapest knowledge first: every A_log, then the layers' vectors, then routers."""
    config = artifact.config

    def there(numbers: Iterable[int], short: str) -> list[Chosen]:
        named = [(layer, artifact.find(shapes.layer_name(artifact.prefix, layer, short))) for layer in numbers]
        return [
            Chosen(layer, short, entry)
            for layer, entry in named
            if entry is not None and entry.nbytes and entry.dtype in _DTYPES
        ]

    routing = [layer for layer in layers if config.is_moe(layer)]
    return [
        *there(config.kda_layers, shapes.A_LOG),
        *there([layer for layer in layers if not config.is_mla(layer)], DT_BIAS),
        *there(routing, ROUTER_BIAS),
        *there(routing, ROUTER),
    ]


def within(chosen: Sequence[Chosen], budget: int | None) -> tuple[list[Chosen], list[Chosen]]:
    """Those that fit the budget (bytes; None: all do), taken in order, and those that do not."""
    taken, left = [], []
    for tensor in chosen:
        if budget is None or tensor.entry.nbytes <= budget:
            taken.append(tensor)
            budget = None if budget is None else budget - tensor.entry.nbytes
        else:
            left.append(tensor)
    return taken, left


def read_values(artifact: Artifact, layers: Sequence[int] | None, progress: Progress) -> Values:
    """Read the chosen layers' tensors; without layers, the default ones, over a network as far as DEFAULT_SHARE allows.

    progress: told (bytes read, bytes in all). Raises SourceError or ArtifactError.
    """
    budget = None
    if layers is None:
        layers = default_layers(artifact.config)
        if artifact.files.kind == "http":
            share = int(DEFAULT_SHARE * (artifact.total_bytes or 0))
            budget = max(share - artifact.files.ledger.fetched_bytes - 1, 0)
    taken, left = within(choose_tensors(artifact, layers), budget)
    total = sum(tensor.entry.nbytes for tensor in taken)
    places = sorted(taken, key=lambda tensor: (tensor.entry.path.name, tensor.entry.offset))
    shards = [list(group) for _, group in groupby(places, key=lambda tensor: tensor.entry.path.name)]
    arrays: dict[tuple[int, str], npt.NDArray[Any]] = {}
    done = 0
    # one shard by one thread, in ascending order: its hash is over the ranges in that order
    reads = read_each([partial(_read_group, artifact, tensors) for tensors in shards], files_at_once(artifact.files))
    for tensors, found in zip(shards, reads, strict=True):
        for tensor, values in zip(tensors, found, strict=True):
            arrays[tensor.layer, tensor.short] = values
            done += tensor.entry.nbytes
        progress(done, total)
    return Values(arrays, tuple(left))


def _read_group(artifact: Artifact, tensors: Sequence[Chosen]) -> list[npt.NDArray[Any]]:
    return [artifact.read(tensor.entry) for tensor in tensors]


def show_left_out(values: Values) -> str:
    """What was not read for want of bytes, by name."""
    shorts = sorted({tensor.short for tensor in values.left_out})
    named = [(short, [tensor.layer for tensor in values.left_out if tensor.short == short]) for short in shorts]
    return "; ".join(f"{short} of layers {ranges(layers)}" for short, layers in named)
