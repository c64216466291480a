"""What a process is told of its part of the model: records that travel to its node and name only what is there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from k3ray.workers.expert_owners import ExpertGroup
from k3ray.workers.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class CheckpointSpec:
    """Which model: its folder, its config when that lies elsewhere, and how many of its layers are run.

    mirrors: further folders with the same checkpoint. partial: every one of the folders may hold a part of the shards,
    and the process binds what its own part needs from all of them together; else each folder is whole and the mirrors
    are asked only for an expert that the first one cannot give. config: the driver's, where the process is not to read
    it from a disk of its own.
    """

    model_dir: Path
    config_path: Path | None
    num_layers: int
    mirrors: tuple[Path, ...] = ()
    partial: bool = False
    config: ModelConfig | None = None


@dataclass(frozen=True, slots=True)
class TapeSpec:
    """A stage's tape: the packed folder, how many of its chunks stay in memory, how many buffers stream the others."""

    folder: Path
    pinned_chunks: int
    ring_chunks: int


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One stage's part: layers first..stop-1 (zero-based), and the cores that its threads may use.

    tape: where its matrices are streamed from; None: they are read whole from the shards. cache_slots: how many of
    its routed experts are in memory at a time; None: all of them. experts: how the shards share them where there are
    shards; empty: in turn. node_id: the Ray node it runs on, None: the driver's. numa: the memory node to bind to,
    numa_bytes: what all processes bound there take. memory_bytes: what is planned for the process, None where no other
    run is told.
    """

    checkpoint: CheckpointSpec
    first: int
    stop: int
    threads: int
    cores: tuple[int, ...]
    tape: TapeSpec | None = None
    cache_slots: int | None = None
    experts: tuple[ExpertGroup, ...] = ()
    node_id: str | None = None
    numa: int | None = None
    numa_bytes: int | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """One shard's part: number `shard` of num_shards, and the experts that ExpertOwners gives to it.

    experts, node_id and what follows: as a stage's.
    """

    checkpoint: CheckpointSpec
    shard: int
    num_shards: int
    threads: int
    cores: tuple[int, ...]
    cache_slots: int | None = None
    experts: tuple[ExpertGroup, ...] = ()
    node_id: str | None = None
    numa: int | None = None
    numa_bytes: int | None = None
    memory_bytes: int | None = None


def part_name(spec: StageSpec | ShardSpec) -> str:
    """What a process holds, in words."""
    if isinstance(spec, ShardSpec):
        return f"shard {spec.shard} of {spec.num_shards}"
    return f"layers {spec.first}..{spec.stop - 1}"
