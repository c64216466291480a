"""Our side of a conformance run: one layer at a time as a Slice of its own, fed in pieces, watched on the way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from k3ray.conform.comparison import spans
from k3ray.kernels.threads import RowPool
from k3ray.workers.cache.circle import CirclePolicy
from k3ray.workers.expert_reader import ExpertReader
from k3ray.workers.experts import ExpertStore, LocalExperts
from k3ray.workers.frames import ActivationFrame
from k3ray.workers.loading import CheckpointSpec, open_checkpoint
from k3ray.workers.model.config import ModelConfig, read_config
from k3ray.workers.model.embedding import Embedding
from k3ray.workers.model.matrices import ShardMatrices
from k3ray.workers.model.slice import Slice, SliceParts
from k3ray.workers.model.state import KdaState, SequenceState
from k3ray.workers.model.weights import WeightSources, read_head, read_layer

Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]

STAGES = (
    "attn_in", "attn_normed", "attn_out", "mlp_in", "router_weights", "latent_in", "latent_aggregate", "latent_normed",
    "shared_out", "mlp_out", "layer_out",
)  # fmt: skip
STATES = ("matrices", "tail_q", "tail_k", "tail_v", "cache_latent", "cache_shared")


@dataclass(frozen=True, slots=True)
class OwnRun:
    """Our answer for a sequence through one layer, as scripts/torch_reference gives its own; all float32."""

    prefix: Float32Array
    blocks: Float32Array
    stages: dict[str, Float32Array]
    state: dict[str, Float32Array]
    expert_ids: Int32Array | None


class OwnLayer:
    """One loaded layer."""

    def __init__(self, layers: Slice, store: ExpertStore, layer: int, latent_width: int) -> None:
        self._slice = layers
        self._store = store
        self._layer = layer
        self._latent_width = latent_width
        self._sessions = 0

    @property
    def experts_read(self) -> int:
        """How many times an expert was read from the disk."""
        return self._store.counts.requests - self._store.counts.hits

    def run(self, prefix: Float32Array, blocks: Float32Array, pieces: tuple[int, ...]) -> OwnRun:
        """Run a new sequence, prefix (tokens, hidden) and blocks (tokens, n, hidden), in pieces of so many tokens."""
        session, self._sessions = self._sessions, self._sessions + 1
        self._slice.open_sequence(session, len(prefix))
        seen: dict[str, list[npt.NDArray[Any]]] = defaultdict(list)

        def observe(name: str, layer: int, values: npt.NDArray[Any]) -> None:
            seen[name].append(values.copy())

        answers = [self._slice.forward(_frame(session, rows, prefix, blocks), observe) for rows in spans(pieces)]
        stages = {name: np.concatenate(parts) for name, parts in seen.items()}
        expert_ids = stages.pop("router_ids", None)
        state = self._state(self._slice.sequence(session))
        self._slice.close_sequence(session)
        return OwnRun(
            np.concatenate([answer.prefix for answer in answers]),
            np.concatenate([answer.blocks for answer in answers]),
            stages,
            state,
            expert_ids,
        )

    def _state(self, sequence: SequenceState) -> dict[str, Float32Array]:
        state = sequence.layers[self._layer]
        if isinstance(state, KdaState):
            tails = {"tail_q": state.tail_q, "tail_k": state.tail_k, "tail_v": state.tail_v}
            return {"matrices": state.matrices, **tails}
        cache = state.cache[: sequence.position]
        return {"cache_latent": cache[:, : self._latent_width], "cache_shared": cache[:, self._latent_width :]}


class OwnModel:
    """A bound checkpoint of which one layer is in memory at a time."""

    def __init__(self, model_dir: Path, config_path: Path | None, threads: int) -> None:
        self.config: ModelConfig = read_config(config_path or model_dir)
        checkpoint = open_checkpoint(CheckpointSpec(model_dir, config_path, self.config.num_hidden_layers))
        self._binding, self._reader = checkpoint.binding, checkpoint.reader
        self._pool = RowPool(threads)
        self._sources = WeightSources(
            self._binding, self._reader, ShardMatrices(self._binding, self._reader), self._pool
        )

    def describe_layer(self, layer: int) -> str:
        """Return a layer's kind, like KDA + MoE."""
        attention = "MLA" if self.config.is_mla(layer) else "KDA"
        return f"{attention} + {'MoE' if self.config.is_moe(layer) else 'dense'}"

    def embed(self, ids: list[int]) -> Float32Array:
        """Return (ids, hidden) f32; TokenIdFailure."""
        table = Embedding(self._reader, self._binding.top["embed_tokens.weight"], self.config.vocab_size)
        return table.rows(np.array(ids, np.int32))

    @contextmanager
    def layer(self, layer: int) -> Iterator[OwnLayer]:
        """Load a layer without its experts; they are read when they are chosen, a few at a time."""
        weights = read_layer(self._sources, layer)
        slots = min(self.config.num_experts, 2 * self.config.num_experts_per_token)
        reader = ExpertReader([(self._binding, self._reader.index)])
        store = ExpertStore(self.config, reader, CirclePolicy(slots), self._pool, lambda asked, expert: asked == layer)
        parts = SliceParts(self.config, (weights,), embedding=None, head=None)
        try:
            yield OwnLayer(Slice(parts, LocalExperts(store), self._pool), store, layer, self.config.kv_lora_rank)
        finally:
            store.close()

    def logits(self, prefix: Float32Array, blocks: Float32Array) -> Float32Array:
        """Return (tokens, vocab) f32 for what leaves the last layer, through the slice that ends the model."""
        parts = SliceParts(self.config, (), embedding=None, head=read_head(self._sources))
        with_head = Slice(parts, _NoExperts(), self._pool)
        return with_head.logits(_frame(0, slice(0, len(prefix)), prefix, blocks))


class _NoExperts:
    """What a slice without layers asks for experts: nothing."""

    def begin(self, layer: int, expert_ids: Int32Array, latents: Float32Array) -> Any:
        """Never called."""
        raise AssertionError("a slice without layers asked for experts")


def _frame(session: int, rows: slice, prefix: Float32Array, blocks: Float32Array) -> ActivationFrame:
    count = rows.stop - rows.start
    return ActivationFrame(
        step=rows.start + 1,
        sessions=np.full(count, session, np.int64),
        positions=np.arange(rows.start, rows.stop, dtype=np.int64),
        ids=np.zeros(count, np.int32),
        wants_logits=np.ones(count, np.bool_),
        prefix=np.ascontiguousarray(prefix[rows]),
        blocks=np.ascontiguousarray(blocks[rows]),
    )
