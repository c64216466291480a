"""What experts a run asked its owners for, found again from its recorded routing: requests, hits and bytes, exactly.

The engine's own cache decides; its disk and its arithmetic are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from k3ray.cluster.placement import Placement
from k3ray.kernels.threads import RowPool
from k3ray.workers.cache.circle import CirclePolicy
from k3ray.workers.checkpoint.binding import Binding, bind
from k3ray.workers.checkpoint.index import open_index
from k3ray.workers.checkpoint.index_table import TensorIndex
from k3ray.workers.expert_owners import ExpertOwners
from k3ray.workers.expert_reader import Expert, ExpertReader, Mxfp4Matrix, Run, runs_of
from k3ray.workers.experts import ExpertStore
from k3ray.workers.model.config import ModelConfig, read_config
from k3ray.workers.tape.direct_io import PAGE_BYTES, Bytes

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
Routing = Sequence[tuple[int, int, Int32Array]]
EMPTY = Mxfp4Matrix(np.zeros((0, 0), np.uint8), np.zeros((0, 0), np.uint8))


@dataclass(frozen=True, slots=True)
class Asked:
    """Over some steps. read_bytes: whole pages, as far as the files have them."""

    requests: int
    hits: int
    read_bytes: int

    def __sub__(self, other: Asked) -> Asked:
        return Asked(self.requests - other.requests, self.hits - other.hits, self.read_bytes - other.read_bytes)


class _Pages(ExpertReader):
    """Counts the bytes that would be read."""

    def __init__(self, binding: Binding, index: TensorIndex) -> None:
        super().__init__([(binding, index)])
        self._sound, self._index = binding, index
        self._file_bytes = {index.directory / shard.name: shard.file_bytes for shard in index.shards}
        self.counted_bytes = 0

    def read(self, layer: int, expert: int, slot: Bytes) -> Expert:
        """See ExpertReader.read."""
        nbytes = sum(self._read_bytes(run) for run in runs_of(self._sound, self._index, layer, expert))
        with self._lock:
            self.counted_bytes += nbytes
        return Expert(EMPTY, EMPTY, EMPTY, damaged=False)

    def _read_bytes(self, run: Run) -> int:
        """The pages that a run touches; a file may end within the last one."""
        end = -(-(run.offset + run.nbytes) // PAGE_BYTES) * PAGE_BYTES
        return min(end, self._file_bytes[run.path]) - run.offset // PAGE_BYTES * PAGE_BYTES


class _Idle(ExpertStore):
    """A store that computes nothing."""

    def _apply(self, expert: Expert, latents: Float32Array) -> Float32Array:
        return np.zeros_like(latents)


class Replay:
    """All owners of a placement's experts, with empty caches."""

    def __init__(self, config: ModelConfig, placement: Placement, model_dir: Path) -> None:
        index = open_index(model_dir)
        binding = bind(read_config(model_dir), index)
        owners = placement.shards or placement.stages
        self._config = config
        self._readers = [_Pages(binding, index) for _ in owners]
        self._pool = RowPool(1)
        self._stores = [
            _Idle(config, reader, CirclePolicy(max(1, owner.budget.cache_slots)), self._pool)
            for owner, reader in zip(owners, self._readers, strict=True)
        ]
        self._layers = [range(stage.first, stage.stop) for stage in placement.stages]
        self._owners = (
            ExpertOwners(len(placement.shards), config.num_experts, placement.experts) if placement.shards else None
        )

    def run(self, routing: Routing) -> None:
        """Ask for what steps have chosen: (step, layer, ids (tokens, k)), in order."""
        for _, layer, ids in routing:
            if self._owners is None:
                store = next(n for n, layers in enumerate(self._layers) if layer in layers)
                self._ask(store, layer, ids, np.ones(ids.shape, bool))
                continue
            owned = self._owners.of(layer, ids)
            for shard in range(len(self._stores)):
                self._ask(shard, layer, ids, owned == shard)

    @property
    def asked(self) -> Asked:
        """Since the beginning."""
        counts = [store.counts for store in self._stores]
        nbytes = sum(reader.counted_bytes for reader in self._readers)
        return Asked(sum(one.requests for one in counts), sum(one.hits for one in counts), nbytes)

    def close(self) -> None:
        """End the threads."""
        for store in self._stores:
            store.close()
        self._pool.close()

    def _ask(self, store: int, layer: int, ids: Int32Array, mine: npt.NDArray[np.bool_]) -> None:
        rows = np.flatnonzero(mine.any(axis=1))
        if len(rows):
            token_rows = np.repeat(np.arange(len(rows), dtype=np.int32), mine[rows].sum(axis=1))
            latents = np.zeros((len(rows), self._config.routed_expert_hidden_size), np.float32)
            self._stores[store].compute(layer, latents, token_rows, ids[mine])
