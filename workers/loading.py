"""From a description of a process's part of the model to that part, loaded: a LayerStage or an ExpertShard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from k3ray.kernels.threads import RowPool
from k3ray.workers.checkpoint.binding import Binding, bind
from k3ray.workers.checkpoint.index import open_index
from k3ray.workers.checkpoint.tensors import TensorReader
from k3ray.workers.expert_fanout import RemoteExperts, ShardLink, shard_of
from k3ray.workers.experts import ExpertStore, LocalExperts
from k3ray.workers.model.config import ModelConfig, read_config
from k3ray.workers.model.embedding import Embedding
from k3ray.workers.model.feed_forward import RoutedExperts
from k3ray.workers.model.slice import Slice, SliceParts
from k3ray.workers.model.weights import Matrices, ShardMatrices, WeightSources, read_head, read_layer
from k3ray.workers.shard import ExpertShard
from k3ray.workers.stage import LayerStage
from k3ray.workers.tape.residency import fixed_residency
from k3ray.workers.tape.source import TapeSource
from k3ray.workers.tape.tape import open_tape


@dataclass(frozen=True, slots=True)
class CheckpointSpec:
    """Which model: its folder, its config when that lies elsewhere, and how many of its layers are run."""

    model_dir: Path
    config_path: Path | None
    num_layers: int


@dataclass(frozen=True, slots=True)
class TapeSpec:
    """A stage's tape: the packed folder, how many of its chunks stay in memory, how many buffers stream the others."""

    folder: Path
    pinned_chunks: int
    ring_chunks: int


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One stage's part: layers first..stop-1 (zero-based), and the cores that its threads may use.

    tape: where its matrices are streamed from; None: they are read whole from the shards.
    """

    checkpoint: CheckpointSpec
    first: int
    stop: int
    threads: int
    cores: tuple[int, ...]
    tape: TapeSpec | None = None


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """One shard's part: the experts that shard_of gives to number `shard` of num_shards, in every MoE layer."""

    checkpoint: CheckpointSpec
    shard: int
    num_shards: int
    threads: int
    cores: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened and bound checkpoint: every tensor of the text model is there, with the shape the config says."""

    config: ModelConfig
    binding: Binding
    reader: TensorReader


def open_checkpoint(spec: CheckpointSpec) -> Checkpoint:
    """Read the config, open the index, bind every tensor; ConfigError or BindError before any weight is read."""
    config = read_config(spec.config_path or spec.model_dir)
    index = open_index(spec.model_dir)
    binding = bind(config, index)
    return Checkpoint(config.truncated(spec.num_layers), binding, TensorReader(index))


def load_stage(spec: StageSpec, shards: Sequence[ShardLink]) -> tuple[LayerStage, ExpertStore]:
    """Load a stage and the store of the routed experts in its process, which is empty where shards hold them."""
    layers, store = load_slice(spec, shards)
    return LayerStage(layers), store


def load_slice(spec: StageSpec, shards: Sequence[ShardLink]) -> tuple[Slice, ExpertStore]:
    """Load a stage's layers; with no shards its routed experts too, into the returned store."""
    checkpoint = open_checkpoint(spec.checkpoint)
    config, binding, reader = checkpoint.config, checkpoint.binding, checkpoint.reader
    pool = RowPool(spec.threads, spec.cores)
    has_head = spec.stop == config.num_hidden_layers
    sources = WeightSources(binding, reader, _matrices(spec, checkpoint, has_head), pool)
    parts = SliceParts(
        config,
        tuple(read_layer(sources, layer) for layer in range(spec.first, spec.stop)),
        embedding=Embedding(reader, binding.top["embed_tokens.weight"], config.vocab_size) if spec.first == 0 else None,
        head=read_head(sources) if has_head else None,
    )
    store = ExpertStore(config, pool)
    experts: RoutedExperts = RemoteExperts(shards) if shards else LocalExperts(store)
    if not shards:
        mine = [layer for layer in range(spec.first, spec.stop) if config.is_moe(layer)]
        store.load(binding, reader, ((layer, expert) for layer in mine for expert in range(config.num_experts)))
    return Slice(parts, experts, pool), store


def _matrices(spec: StageSpec, checkpoint: Checkpoint, has_head: bool) -> Matrices:
    """The stage's tape, read ahead from now on; without one the shards."""
    if spec.tape is None:
        return ShardMatrices(checkpoint.binding, checkpoint.reader)
    head_layer = checkpoint.binding.config.num_hidden_layers
    layers = [*range(spec.first, spec.stop), *([head_layer] if has_head else [])]
    tape = open_tape(spec.tape.folder, checkpoint.binding, checkpoint.reader, layers)
    chunks = tape.layout.chunks_of(spec.first, spec.stop, has_head)
    return TapeSource(tape, fixed_residency(tape.layout, chunks, spec.tape.pinned_chunks, spec.tape.ring_chunks))


def load_shard(spec: ShardSpec) -> tuple[ExpertShard, ExpertStore]:
    """Load a shard's experts of every MoE layer."""
    checkpoint = open_checkpoint(spec.checkpoint)
    config = checkpoint.config
    store = ExpertStore(config, RowPool(spec.threads, spec.cores))
    mine = [expert for expert in range(config.num_experts) if shard_of(expert, spec.num_shards) == spec.shard]
    wanted = ((layer, expert) for layer in config.moe_layers for expert in mine)
    store.load(checkpoint.binding, checkpoint.reader, wanted)
    return ExpertShard(store), store
