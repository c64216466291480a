"""A run of consecutive layers as plain Python: a frame of tokens in, a frame out, its sequences' state moved on.

It knows nothing of Ray, of other slices, or of whether a frame has been seen before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from k3ray.kernels import attnres, router
from k3ray.kernels.mxfp4 import NonFiniteInput
from k3ray.kernels.norm import rmsnorm
from k3ray.kernels.threads import RowPool
from k3ray.workers.failure import Failure
from k3ray.workers.frames import ActivationFrame
from k3ray.workers.model.attention import kda_attention, mla_attention
from k3ray.workers.model.config import ModelConfig
from k3ray.workers.model.embedding import Embedding
from k3ray.workers.model.feed_forward import Observe, RoutedExperts, mixture_of_experts, mlp
from k3ray.workers.model.finite import NonFiniteProduct, first_not_finite
from k3ray.workers.model.snapshot import Restoring, StatePiece, encode_piece, pieces_of
from k3ray.workers.model.state import KdaState, MlaState, SequenceFailure, SequenceState, new_sequence
from k3ray.workers.model.weights import HeadWeights, KdaWeights, LayerWeights, MoeWeights

Float32Array = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]


class NonFiniteActivation(Failure):
    """A NaN or an infinity appeared; nothing of the step is used."""


@dataclass(frozen=True, slots=True)
class SliceParts:
    """What a slice is made of. embedding: of the first slice only. head: of the last slice only."""

    config: ModelConfig
    layers: tuple[LayerWeights, ...]
    embedding: Embedding | None
    head: HeadWeights | None


class Slice:
    """Layers first..last of the model with the state of every open sequence."""

    def __init__(self, parts: SliceParts, experts: RoutedExperts, pool: RowPool) -> None:
        self._parts = parts
        self._config = parts.config
        self._experts = experts
        self._pool = pool
        self._sequences: dict[int, SequenceState] = {}
        self._restoring: dict[int, Restoring] = {}

    @property
    def has_head(self) -> bool:
        """Whether this is the last slice, whose answer is logits."""
        return self._parts.head is not None

    @property
    def covered(self) -> range:
        """The zero-based layers of this slice."""
        return range(self._parts.layers[0].layer, self._parts.layers[-1].layer + 1)

    def open_sequence(self, session: int, capacity: int) -> None:
        """Begin an empty sequence that may grow to capacity positions; SequenceFailure when it is open already."""
        if session in self._sequences:
            raise SequenceFailure(f"session {session} is open already: close it before it is opened again")
        self._sequences[session] = new_sequence(self._config, self.covered, capacity)

    def close_sequence(self, session: int) -> None:
        """Forget a sequence; closing an unknown one does nothing."""
        self._sequences.pop(session, None)
        self._restoring.pop(session, None)

    def pieces(self, session: int) -> list[StatePiece]:
        """Return the pieces that a snapshot of the sequence consists of, as long as no step is applied."""
        return pieces_of(self.sequence(session))

    def snapshot_piece(self, session: int, piece: StatePiece) -> pa.Buffer:
        """Return one piece of the sequence's state as a message; SequenceFailure when it has moved on."""
        return encode_piece(self.sequence(session), piece)

    def restore_piece(self, session: int, message: pa.Buffer, capacity: int) -> None:
        """Take one piece of a saved sequence; the first one begins it, finish_restore opens it.

        Raises SequenceFailure when the session is open, SnapshotDamaged, SnapshotMismatch.
        """
        if session in self._sequences:
            raise SequenceFailure(f"session {session} is open already: close it before it is restored")
        if session not in self._restoring:
            self._restoring[session] = Restoring(self._config, self.covered, capacity)
        self._restoring[session].add(message)

    def finish_restore(self, session: int) -> None:
        """Open the sequence whose pieces are all here; SnapshotDamaged when one is missing."""
        if session not in self._restoring:
            raise SequenceFailure(f"session {session}: no piece of its saved state arrived here")
        self._sequences[session] = self._restoring.pop(session).finish()

    def sequence(self, session: int) -> SequenceState:
        """Return an open sequence's state, for snapshots and proofs; SequenceFailure when it is not open."""
        state = self._sequences.get(session)
        if state is None:
            raise SequenceFailure(f"session {session} is not open here: a step for it arrived after a loss or a close")
        return state

    def forward(self, frame: ActivationFrame, observe: Observe = lambda name, layer, values: None) -> ActivationFrame:
        """Run every layer on the frame's tokens and return the frame with its new streams.

        Raises SequenceFailure before anything is touched when a sequence is not at its first token's position, and
        NonFiniteActivation when a value is not finite: the frame's sequences cannot be used after that.
        """
        segments = [(session, slice(low, high)) for session, low, high in frame.segments()]
        for session, rows in segments:
            self.sequence(session).expect(session, int(frame.positions[rows.start]), rows.stop - rows.start)
        try:
            prefix, blocks = self._enter(frame)
            for weights in self._parts.layers:
                prefix, blocks = self._run_layer(weights, segments, frame, prefix, blocks, observe)
        except BaseException as error:
            for session, _ in segments:
                self._sequences[session].broken = f"a step failed half way ({type(error).__name__}: {error})"
            raise
        for session, rows in segments:
            self._sequences[session].position += rows.stop - rows.start
        return replace(frame, prefix=prefix, blocks=blocks)

    def logits(self, frame: ActivationFrame, observe: Observe = lambda name, layer, values: None) -> Float32Array:
        """Return (wanted tokens, vocab) f32 for the frame that forward returned; the last slice only."""
        head = self._parts.head
        if head is None:
            raise SequenceFailure("logits were asked of a slice that does not hold the head")
        wanted = np.flatnonzero(frame.wants_logits)
        layer = self._config.num_hidden_layers
        mixed = attnres.mix(frame.blocks[wanted], frame.prefix[wanted], head.fold, self._config.rms_norm_eps)
        observe("final_mix", layer, mixed)
        normed = rmsnorm(mixed, head.norm, self._config.rms_norm_eps)
        observe("final_norm", layer, normed)
        with finite_or_named("logits", layer, frame.positions[wanted]):
            return head.head.apply(normed)

    def _enter(self, frame: ActivationFrame) -> tuple[Float32Array, Float32Array]:
        if self._parts.embedding is None:
            return frame.prefix, frame.blocks
        prefix = self._parts.embedding.rows(frame.ids)
        self._check("embedding", 0, frame.positions, prefix)
        return prefix, np.zeros((len(prefix), 0, self._config.hidden_size), np.float32)

    def _run_layer(
        self,
        weights: LayerWeights,
        segments: list[tuple[int, slice]],
        frame: ActivationFrame,
        prefix: Float32Array,
        blocks: Float32Array,
        observe: Observe,
    ) -> tuple[Float32Array, Float32Array]:
        config, layer, eps = self._config, weights.layer, self._config.rms_norm_eps
        h = attnres.mix(blocks, prefix, weights.attention_fold, eps) if blocks.shape[1] else prefix
        observe("attn_in", layer, h)
        begins_block = layer % config.attn_res_block_size == 0
        if begins_block:
            blocks = np.concatenate([blocks, prefix[:, None, :]], axis=1)
        normed = rmsnorm(h, weights.attention_norm, eps)
        observe("attn_normed", layer, normed)
        kind = "MLA attention" if config.is_mla(layer) else "KDA attention"
        with finite_or_named(kind, layer, frame.positions):
            a = self._attend(weights, segments, frame, normed)
        observe("attn_out", layer, a)
        prefix = a if begins_block else prefix + a
        h = attnres.mix(blocks, prefix, weights.mlp_fold, eps)
        observe("mlp_in", layer, h)
        kind = "MoE" if config.is_moe(layer) else "dense MLP"
        with finite_or_named(kind, layer, frame.positions):
            m = self._feed_forward(weights, frame, rmsnorm(h, weights.mlp_norm, eps), observe)
        observe("mlp_out", layer, m)
        prefix = prefix + m
        self._check(kind, layer, frame.positions, prefix)
        observe("layer_out", layer, prefix)
        return prefix, blocks

    def _attend(
        self, weights: LayerWeights, segments: list[tuple[int, slice]], frame: ActivationFrame, x: Float32Array
    ) -> Float32Array:
        layer, attention = weights.layer, weights.attention
        states = [(self._sequences[session].layers[layer], rows) for session, rows in segments]
        if isinstance(attention, KdaWeights):
            kda_sequences = [(state, rows) for state, rows in states if isinstance(state, KdaState)]
            return kda_attention(self._config, attention, x, kda_sequences, self._pool)
        mla_sequences = [
            (state, int(frame.positions[rows.start]), rows) for state, rows in states if isinstance(state, MlaState)
        ]
        return mla_attention(self._config, attention, x, mla_sequences, self._pool)

    def _feed_forward(
        self, weights: LayerWeights, frame: ActivationFrame, x: Float32Array, observe: Observe
    ) -> Float32Array:
        if not isinstance(weights.mlp, MoeWeights):
            return mlp(self._config, weights.mlp, x)
        return mixture_of_experts(self._config, weights.mlp, weights.layer, x, self._experts, observe)

    def _check(self, kind: str, layer: int, positions: Int64Array, values: Float32Array) -> None:
        row = first_not_finite(values)
        if row is not None:
            raise NonFiniteActivation(_not_finite(kind, layer, f"position {positions[row]}", "a NaN or infinite value"))


@contextmanager
def finite_or_named(kind: str, layer: int, positions: Int64Array) -> Iterator[None]:
    """Say of what is found not finite inside where in the model and in the sequence it is; NonFiniteActivation."""
    try:
        yield
    except NonFiniteProduct as error:
        place = f"position {positions[error.row]}"
        raise NonFiniteActivation(_not_finite(kind, layer, place, str(error))) from None
    except (router.NonFiniteScore, NonFiniteInput) as error:
        place = f"positions {positions.min()}..{positions.max()}"
        raise NonFiniteActivation(_not_finite(kind, layer, place, str(error))) from None


def _not_finite(kind: str, layer: int, place: str, found: str) -> str:
    return (
        f"layer {layer} ({kind}), {place}: {found}; nothing was sampled from it. A weight is damaged or the config "
        "does not fit this checkpoint: run `k3ray verify` and `k3ray inspect`"
    )
