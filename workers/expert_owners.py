"""Which shard owns which expert: every expert exactly once. Stage and shard find it from the same few counts.

Without counts experts are dealt out in turn, alike in every layer; with them a shard owns any number of the experts of
the layers that it serves, spread evenly over these layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from k3ray.workers.failure import Failure

Int32Array = npt.NDArray[np.int32]


class NoOwner(Failure):
    """An expert of a layer that the plan has given to no shard."""


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """MoE layers that the same shards can serve. counts: experts of these layers that each shard owns."""

    layers: tuple[int, ...]
    counts: tuple[int, ...]


def deal_experts(group: ExpertGroup, num_experts: int) -> Int32Array:
    """The owner of every expert of the group, (layers, num_experts): each shard's are spread evenly over all of them.

    The i-th of a shard's n experts belongs at (i + 1/2) / n of the whole; ties go to the lower shard.
    """
    counts = np.asarray(group.counts, dtype=np.int64)
    if int(counts.sum()) != len(group.layers) * num_experts:
        raise ValueError(f"{counts.sum()} experts dealt, expected {len(group.layers)} x {num_experts}")
    owners = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts if count])
    return owners[np.argsort(places, kind="stable")].reshape(len(group.layers), num_experts)


def shard_of(expert: Any, num_shards: int) -> Any:
    """Return which shard holds an expert, or each of an array of them, where they are dealt out in turn."""
    return expert % num_shards


class ExpertOwners:
    """The owners of all experts of one plan. groups: the counts, empty where experts are dealt out in turn."""

    def __init__(self, num_shards: int, num_experts: int = 0, groups: Sequence[ExpertGroup] = ()) -> None:
        self._num_shards = num_shards
        self._tables: dict[int, Int32Array] | None = None
        if groups:
            if any(len(group.counts) != num_shards for group in groups):
                raise ValueError(f"experts counted out over another number of shards than {num_shards}")
            dealt = [(group.layers, deal_experts(group, num_experts)) for group in groups]
            self._tables = {layer: row for layers, rows in dealt for layer, row in zip(layers, rows, strict=True)}

    def of(self, layer: int, experts: Int32Array) -> Int32Array:
        """Return the owner of each of an array of a layer's experts, in its shape; NoOwner."""
        if self._tables is None:
            dealt: Int32Array = shard_of(experts, self._num_shards)
            return dealt
        if layer not in self._tables:
            raise NoOwner(f"layer {layer} has routed experts and the plan gives them to no shard: make the plan again")
        return self._tables[layer][experts]

    def held_by(self, shard: int, layers: Sequence[int], num_experts: int) -> dict[int, npt.NDArray[np.bool_]]:
        """Return which experts a shard owns of these layers: (num_experts,) bool by layer, none where it owns none."""
        everyone = np.arange(num_experts, dtype=np.int32)
        masks = {layer: self.of(layer, everyone) == shard for layer in layers}
        return {layer: mask for layer, mask in masks.items() if mask.any()}
