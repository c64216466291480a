"""A LayerStage: a slice that answers messages, each exactly once.

It does not know who sends the messages or how they travel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from k3ray.workers.failure import Failure
from k3ray.workers.frames import ActivationFrame, LogitsFrame, decode_activations, encode_activations, encode_logits
from k3ray.workers.held_snapshot import HeldSnapshot, SnapshotChunk, SnapshotGone, SnapshotPlace
from k3ray.workers.message_counts import Traffic
from k3ray.workers.model.feed_forward import Observe
from k3ray.workers.model.slice import Slice
from k3ray.workers.model.snapshot import StatePiece
from k3ray.workers.stage_sign import Idleness
from k3ray.workers.step_times import StepClock, StepTimes

DamagedAmong = Callable[[int, npt.NDArray[np.int32]], tuple[int, ...]]


class StepConflict(Failure):
    """Two different frames under one step number."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The last step that was applied, and what was answered to it."""

    step: int
    digest: bytes
    answer: pa.Buffer


class LayerStage:
    """Applies a frame only at the position it expects; the frame it has just applied gets the recorded answer.

    A frame for any other position is an error, never a silent second update (state.py, SequenceState.expect).
    """

    def __init__(self, layers: Slice, damaged_among: DamagedAmong = lambda layer, experts: ()) -> None:
        """damaged_among: which of a layer's experts, all of which were used, have a NaN scale byte."""
        self._slice = layers
        self._damaged_among = damaged_among
        self._answered: Answered | None = None
        self._clock = StepClock()
        self._idleness = Idleness()
        self.traffic = Traffic()
        self._held: dict[int, HeldSnapshot] = {}
        self._recorded: list[tuple[int, int, npt.NDArray[np.int32]]] | None = None

    def record_routing(self) -> None:
        """Keep from now on which experts every token chose."""
        self._recorded = []

    def recorded_routing(self) -> list[tuple[int, int, npt.NDArray[np.int32]]]:
        """Return what was recorded: (step, layer, ids (tokens, k)), in order."""
        return self._recorded or []

    @property
    def times(self) -> StepTimes:
        """Where the time of the steps so far went, in this process."""
        return self._clock.times

    @property
    def idle_s(self) -> float:
        """For how long it has had nothing to do; any thread may ask."""
        return self._idleness.seconds

    @property
    def has_head(self) -> bool:
        """Whether its answers are logits."""
        return self._slice.has_head

    def open_sequence(self, session: int, capacity: int) -> None:
        """Begin an empty sequence of at most capacity positions."""
        self._answered = None  # what is sent from now on is no repetition, also when another driver counts anew
        self._slice.open_sequence(session, capacity)

    def close_sequence(self, session: int) -> None:
        """Forget a sequence."""
        self._let_go(session)
        self._slice.close_sequence(session)

    def pieces(self, session: int) -> list[StatePiece]:
        """See Slice.pieces."""
        return self._slice.pieces(session)

    def snapshot_piece(self, session: int, piece: StatePiece) -> pa.Buffer:
        """See Slice.snapshot_piece."""
        return self._slice.snapshot_piece(session, piece)

    def snapshot(self, session: int) -> SnapshotPlace:
        """Write the sequence's state where others can read it, until its next snapshot or its close."""
        self._let_go(session)
        pieces = (self._slice.snapshot_piece(session, piece) for piece in self._slice.pieces(session))
        with self._idleness.interrupted():
            self._held[session] = HeldSnapshot(pieces)
        return self._held[session].place

    def snapshot_chunk(self, session: int, offset: int) -> SnapshotChunk:
        """Return a part of the last snapshot (HeldSnapshot.chunk); another thread than apply's may ask for it."""
        held = self._held.get(session)
        if held is None:
            raise SnapshotGone(f"no snapshot of session {session} is held: it was closed meanwhile")
        return held.chunk(offset)

    def _let_go(self, session: int) -> None:
        held = self._held.pop(session, None)
        if held is not None:
            held.close()

    def restore_piece(self, session: int, message: pa.Buffer, capacity: int) -> None:
        """See Slice.restore_piece."""
        with self._idleness.interrupted():
            self._slice.restore_piece(session, message, capacity)

    def finish_restore(self, session: int) -> None:
        """See Slice.finish_restore."""
        self._slice.finish_restore(session)

    @property
    def covered(self) -> range:
        """The zero-based layers of this stage."""
        return self._slice.covered

    def apply(self, message: pa.Buffer) -> pa.Buffer:
        """Return the next stage's frame, or the logits when this is the last stage.

        Raises StepConflict for a second, different frame of the step just applied; SequenceFailure for a frame at
        an unexpected position; NonFiniteActivation.
        """
        self._clock.begin()
        with self._idleness.interrupted():
            answer = self._answer_to(message)
        self.traffic.send(answer.size)
        self.traffic.receive(message.size)
        return answer

    def _answer_to(self, message: pa.Buffer) -> pa.Buffer:
        frame = decode_activations(message)
        self.traffic.positions += len(frame.positions)
        digest = hashlib.blake2b(memoryview(message), digest_size=16).digest()
        if self._answered is not None and self._answered.step == frame.step:
            if self._answered.digest == digest:
                return self._answered.answer
            raise StepConflict(f"step {frame.step} arrived twice with different contents: a second driver?")
        used: list[tuple[int, npt.NDArray[np.int32]]] = []
        moved = self._slice.forward(frame, self._observe(frame.step, used))
        damaged = {(layer, expert) for layer, ids in used for expert in self._damaged_among(layer, ids)}
        if damaged:
            moved = replace(moved, damaged=tuple(sorted(damaged.union(moved.damaged))))
        self._clock.begin_head()
        answer = self._logits(moved) if self._slice.has_head else encode_activations(moved)
        self._clock.end(with_head=self._slice.has_head)
        self._answered = Answered(frame.step, digest, answer)
        return answer

    def _observe(self, step: int, used: list[tuple[int, npt.NDArray[np.int32]]]) -> Observe:
        def observe(name: str, layer: int, values: npt.NDArray[np.generic]) -> None:
            self._clock.observed(name)
            if name == "router_ids":
                used.append((layer, values.astype(np.int32)))
                if self._recorded is not None:
                    self._recorded.append((step, *used[-1]))

        return observe

    def _logits(self, moved: ActivationFrame) -> pa.Buffer:
        wanted, logits = moved.wants_logits, self._slice.logits(moved)
        places = moved.sessions[wanted], moved.positions[wanted]
        return encode_logits(LogitsFrame(moved.step, *places, logits, moved.damaged))
