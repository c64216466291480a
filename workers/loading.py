"""From a description of a process's part of the model to that part, loaded: a LayerStage or an ExpertShard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from k3ray.kernels.threads import RowPool
from k3ray.workers.cache.circle import CirclePolicy
from k3ray.workers.checkpoint.binding import Binding, bind
from k3ray.workers.checkpoint.index import CheckpointError, open_index, open_names, open_part
from k3ray.workers.checkpoint.part_binding import ModelPart, bind_part
from k3ray.workers.checkpoint.tensors import TensorReader
from k3ray.workers.expert_fanout import RemoteExperts, ShardLink
from k3ray.workers.expert_owners import ExpertOwners
from k3ray.workers.expert_reader import ExpertReader
from k3ray.workers.experts import ExpertStore, LocalExperts
from k3ray.workers.io_counts import IoCounts
from k3ray.workers.message_counts import Traffic
from k3ray.workers.model.config import ModelConfig, read_config
from k3ray.workers.model.embedding import Embedding
from k3ray.workers.model.matrices import Matrices, ShardMatrices
from k3ray.workers.model.slice import Slice, SliceParts
from k3ray.workers.model.weights import WeightSources, read_head, read_layer
from k3ray.workers.shard import ExpertShard
from k3ray.workers.specs import CheckpointSpec, ShardSpec, StageSpec, TapeSpec
from k3ray.workers.stage import LayerStage
from k3ray.workers.tape.residency import fixed_residency
from k3ray.workers.tape.source import TapeSource
from k3ray.workers.tape.tape import open_tape

__all__ = [
    "Checkpoint", "CheckpointSpec", "LoadedSlice", "ShardSpec", "StageSpec", "TapeSpec", "load_shard", "load_slice",
    "load_stage", "open_checkpoint",
    "open_what_is_here",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened and bound checkpoint: every tensor of the text model is there, with the shape the config says.

    config: cut to the layers that are run; binding and reader: of the whole checkpoint. mirrors: bound like it.
    partial: only what was asked for is bound, and the folders hold it together.
    """

    config: ModelConfig
    binding: Binding
    reader: TensorReader
    mirrors: tuple[tuple[Binding, TensorReader], ...]
    partial: bool = False


@dataclass(frozen=True, slots=True)
class LoadedSlice:
    """A slice with what it reads from. store: None where shards hold the experts; tape: None without one."""

    layers: Slice
    experts: LocalExperts | RemoteExperts
    store: ExpertStore | None
    tape: TapeSource | None

    @property
    def shard_traffic(self) -> list[Traffic]:
        """What was exchanged with every shard; empty without shards."""
        return self.experts.traffic if isinstance(self.experts, RemoteExperts) else []

    def counts(self) -> IoCounts:
        """Return what was read and waited for so far."""
        return IoCounts.of(self.store, self.tape)

    def damaged_met(self) -> list[tuple[int, int]]:
        """See ExpertStore.damaged_met."""
        return self.store.damaged_met() if self.store is not None else []

    def close(self) -> None:
        """End the reading threads."""
        for part in (self.store, self.tape):
            if part is not None:
                part.close()


def open_checkpoint(spec: CheckpointSpec, part: ModelPart | None = None) -> Checkpoint:
    """Read the config, open the index, bind every tensor; ConfigError or BindError before any weight is read.

    part: what is bound of folders that hold a part of the shards (spec.partial); nothing of them unless given.
    """
    config, folders = _config(spec), (spec.model_dir, *spec.mirrors)
    truncated = config.truncated(spec.num_layers)
    if spec.partial:
        indices = [open_part(folder) for folder in folders]
        binding = bind_part(config, indices, part or ModelPart())
        others = tuple((binding, TensorReader(index)) for index in indices[1:])
        return Checkpoint(truncated, binding, TensorReader(*indices), others, partial=True)
    (binding, reader), *mirrors = (_bound(config, folder) for folder in folders)
    return Checkpoint(truncated, binding, reader, tuple(mirrors))


def open_what_is_here(spec: CheckpointSpec) -> Checkpoint:
    """The checkpoint as this host has it: whole and bound, else the part that is here, with nothing bound of it.

    Raises CheckpointError where a folder has not even the index file, which names the tensors.
    """
    try:
        return open_checkpoint(spec)
    except CheckpointError:
        pass
    config = _config(spec)
    try:
        index = open_part(spec.model_dir)
    except CheckpointError:
        index = open_names(spec.model_dir)
    binding = bind_part(config, [index], ModelPart())
    return Checkpoint(config.truncated(spec.num_layers), binding, TensorReader(index), (), partial=True)


def load_slice(spec: StageSpec, shards: Sequence[ShardLink]) -> LoadedSlice:
    """Load a stage's layers; its routed experts are read when they are first needed, unless shards hold them."""
    config = _config(spec.checkpoint).truncated(spec.checkpoint.num_layers)
    layers = [layer for layer in config.moe_layers if spec.first <= layer < spec.stop]
    has_head = spec.stop == config.num_hidden_layers
    experts = {} if shards else {layer: np.ones(config.num_experts, dtype=bool) for layer in layers}
    part = ModelPart(range(spec.first, spec.stop), spec.first == 0, has_head, experts)
    checkpoint = open_checkpoint(spec.checkpoint, part)
    binding, reader = checkpoint.binding, checkpoint.reader
    pool = RowPool(spec.threads, spec.cores)
    tape = _open_tape(spec, checkpoint, has_head)
    matrices: Matrices = ShardMatrices(binding, reader) if tape is None else tape
    sources = WeightSources(binding, reader, matrices, pool)
    parts = SliceParts(
        config,
        tuple(read_layer(sources, layer) for layer in range(spec.first, spec.stop)),
        embedding=Embedding(reader, binding.top["embed_tokens.weight"], config.vocab_size) if spec.first == 0 else None,
        head=read_head(sources) if has_head else None,
    )
    if shards:
        owners = ExpertOwners(len(shards), config.num_experts, spec.experts)
        remote = RemoteExperts(shards, owners)
        return LoadedSlice(Slice(parts, remote, pool), remote, None, tape)
    owned = len(layers) * config.num_experts
    store = _open_store(checkpoint, pool, owned, spec.cache_slots, lambda layer, expert: layer in layers)
    local = LocalExperts(store)
    return LoadedSlice(Slice(parts, local, pool), local, store, tape)


def load_stage(spec: StageSpec, shards: Sequence[ShardLink]) -> tuple[LayerStage, LoadedSlice]:
    """Load a stage; see load_slice."""
    loaded = load_slice(spec, shards)
    return LayerStage(loaded.layers, loaded.experts.damaged_among), loaded


def load_shard(spec: ShardSpec) -> tuple[ExpertShard, ExpertStore]:
    """Open a shard's cache; its experts are read when they are first needed."""
    config = _config(spec.checkpoint).truncated(spec.checkpoint.num_layers)
    owners = ExpertOwners(spec.num_shards, config.num_experts, spec.experts)
    mine = owners.held_by(spec.shard, config.moe_layers, config.num_experts)
    checkpoint, pool = open_checkpoint(spec.checkpoint, ModelPart(experts=mine)), RowPool(spec.threads, spec.cores)

    def owns(layer: int, expert: int) -> bool:
        return layer in mine and bool(mine[layer][expert])

    owned = sum(int(mask.sum()) for mask in mine.values())
    store = _open_store(checkpoint, pool, owned, spec.cache_slots, owns)
    return ExpertShard(store), store


def _config(spec: CheckpointSpec) -> ModelConfig:
    return spec.config or read_config(spec.config_path or spec.model_dir)


def _bound(config: ModelConfig, folder: Path) -> tuple[Binding, TensorReader]:
    index = open_index(folder)
    return bind(config, index), TensorReader(index)


def _open_store(
    checkpoint: Checkpoint, pool: RowPool, owned: int, slots: int | None, owns: Callable[[int, int], bool]
) -> ExpertStore:
    roots = [(checkpoint.binding, checkpoint.reader.index)]
    roots += [(binding, reader.index) for binding, reader in checkpoint.mirrors]
    reader = ExpertReader(roots, spread=checkpoint.partial)
    num_slots = max(1, owned if slots is None else min(slots, owned))
    return ExpertStore(checkpoint.config, reader, CirclePolicy(num_slots), pool, owns)


def _open_tape(spec: StageSpec, checkpoint: Checkpoint, has_head: bool) -> TapeSource | None:
    """Open the stage's part of its tape, and begin to read it ahead."""
    if spec.tape is None:
        return None
    head_layer = checkpoint.binding.config.num_hidden_layers
    layers = [*range(spec.first, spec.stop), *([head_layer] if has_head else [])]
    tape = open_tape(spec.tape.folder, checkpoint.binding, checkpoint.reader, layers)
    chunks = tape.layout.chunks_of(spec.first, spec.stop, has_head)
    return TapeSource(tape, fixed_residency(tape.layout, chunks, spec.tape.pinned_chunks, spec.tape.ring_chunks))
