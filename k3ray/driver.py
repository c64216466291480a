"""The driver: owns the sessions and what each has committed, cuts tokens into steps, sends them down the stages.

It moves no activations, and knows neither text nor sampling.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from k3ray.cluster.signals import held_signals
from k3ray.workers.failure import Failure
from k3ray.workers.frames import STEP_TOKENS, ActivationFrame, decode_logits, encode_activations
from k3ray.workers.model.snapshot import StatePiece

Float32Array = npt.NDArray[np.float32]


class StepMismatch(Failure):
    """An answer that belongs to another step or to other positions than were asked for."""


class StageChain(Protocol):
    """The stages of one model, wherever they run."""

    @property
    def num_stages(self) -> int:
        """How many stages a frame passes."""
        ...

    def open_sequence(self, session: int, capacity: int) -> None:
        """Begin an empty sequence in every stage."""
        ...

    def close_sequence(self, session: int) -> None:
        """Forget a sequence in every stage."""
        ...

    def snapshot(self, session: int) -> Iterator[tuple[StatePiece, pa.Buffer]]:
        """Yield a sequence's state piece by piece; no step may be sent meanwhile."""
        ...

    def restore(self, session: int, pieces: Iterable[tuple[int, pa.Buffer]], capacity: int) -> None:
        """Open a sequence from all (layer, piece)s of its state."""
        ...

    def submit(self, message: pa.Buffer) -> Any:
        """Send a frame down the chain without waiting; returns a ticket."""
        ...

    def collect(self, ticket: Any) -> pa.Buffer:
        """Wait for the last stage's answer to a ticket."""
        ...

    def damaged_met(self) -> list[tuple[int, int]]:
        """Return (layer, expert) of every damaged expert used so far."""
        ...


@runtime_checkable
class LastingChain(Protocol):
    """A chain that outlives its actors: it keeps states, and can be told to hurry."""

    def restore_point(self, session: int) -> Iterator[tuple[StatePiece, pa.Buffer]]:
        """Yield a sequence's state at the last moment at which it was kept, asking nobody."""
        ...

    def limit(self, seconds: float | None) -> None:
        """Wait no longer than so many seconds from now on, and replace nobody; None: as before."""
        ...


@dataclass(slots=True)
class Session:
    """One sequence: the ids that every stage has applied."""

    number: int
    capacity: int
    committed: list[int]


class Driver:
    """Sessions over a chain of stages."""

    def __init__(self, chain: StageChain, prompt_chunk: int = STEP_TOKENS) -> None:
        self._chain = chain
        self._prompt_chunk = prompt_chunk
        self._sessions: dict[int, Session] = {}
        self._next_session = 0
        self._next_step = 0
        self._in_flight: deque[tuple[ActivationFrame, Any]] = deque()
        self._answers: dict[int, list[Float32Array]] = {}

    def open(self, capacity: int) -> int:
        """Begin an empty sequence of at most capacity positions; returns its session number."""
        session = self._next_session
        self._next_session += 1
        self._chain.open_sequence(session, capacity)
        self._sessions[session] = Session(session, capacity, [])
        return session

    def restore(self, ids: Sequence[int], pieces: Iterable[tuple[int, pa.Buffer]], capacity: int) -> int:
        """Open a sequence that has applied ids, from all (layer, piece)s of its state; returns its session number.

        Raises SnapshotDamaged or SnapshotMismatch; the stages hold nothing of it then.
        """
        session = self._next_session
        self._next_session += 1
        try:
            self._chain.restore(session, pieces, capacity)
        except Failure:
            self._chain.close_sequence(session)
            raise
        self._sessions[session] = Session(session, capacity, list(ids))
        return session

    def snapshot(self, session: int) -> Iterator[tuple[StatePiece, pa.Buffer]]:
        """Yield the session's state piece by piece; StepMismatch when the stages are not where it is."""
        position = len(self._sessions[session].committed)
        for piece, message in self._chain.snapshot(session):
            if piece.position != position:
                raise StepMismatch(f"layer {piece.layer} is at position {piece.position}, the session at {position}")
            yield piece, message

    def restore_point(self, session: int) -> tuple[int, Iterator[tuple[StatePiece, pa.Buffer]]]:
        """Return how many of the session's ids are in the last state that was kept of it, and that state's pieces.

        No process is asked for it: it is there also when some are lost. 0: none was kept.
        """
        if not isinstance(self._chain, LastingChain):
            return 0, iter(())
        pieces = self._chain.restore_point(session)
        first = next(pieces, None)
        if first is None:
            return 0, iter(())
        return first[0].position, chain([first], pieces)

    def limit(self, seconds: float | None) -> None:
        """Give up waiting for the chain after so many seconds, where it can; None: wait as before."""
        if isinstance(self._chain, LastingChain):
            self._chain.limit(seconds)

    def settle(self, session: int) -> Float32Array | None:
        """Wait for what an interrupted forward has sent, and commit it.

        Returns (vocab,) f32, the logits of the last committed id, when they were asked for.
        """
        self._collect_all()
        rows = self._answers.get(session)
        return rows[-1][-1] if rows else None

    def close(self, session: int) -> None:
        """Forget a sequence."""
        if self._sessions.pop(session, None) is not None:
            self._chain.close_sequence(session)

    def committed(self, session: int) -> tuple[int, ...]:
        """Return the ids that the session has applied."""
        return tuple(self._sessions[session].committed)

    def damaged_met(self) -> list[tuple[int, int]]:
        """Return (layer, expert) of every damaged expert used so far."""
        return self._chain.damaged_met()

    def forward(self, tokens: Mapping[int, Sequence[int]], every_position: bool = False) -> dict[int, Float32Array]:
        """Apply each session's ids after what it has committed, all sessions together.

        Returns per session logits f32: (ids, vocab) with every_position, else (1, vocab) of the last id. A failure
        leaves the sessions of that step unusable; committed are the ids whose steps were answered. After an
        interruption (KeyboardInterrupt) settle() makes them usable again.
        """
        self._in_flight.clear()
        self._answers = {session: [] for session in tokens}
        for frame in self._frames(tokens, every_position):
            with held_signals():  # a step that some stages were sent and nobody waits for would be lost
                self._in_flight.append((frame, self._chain.submit(encode_activations(frame))))
            if len(self._in_flight) > self._chain.num_stages:  # a stage has one frame at work and one waiting
                self._collect_oldest()
        self._collect_all()
        return {session: np.concatenate(parts) for session, parts in self._answers.items()}

    def _frames(self, tokens: Mapping[int, Sequence[int]], every_position: bool) -> Iterator[ActivationFrame]:
        sent = dict.fromkeys(tokens, 0)
        begins = {session: len(self._sessions[session].committed) for session in tokens}
        while any(sent[session] < len(ids) for session, ids in tokens.items()):
            sessions: list[int] = []
            positions: list[int] = []
            taken: list[int] = []
            wants: list[bool] = []
            for session, ids in tokens.items():
                chunk = ids[sent[session] : sent[session] + self._prompt_chunk]
                first = begins[session] + sent[session]
                sent[session] += len(chunk)
                sessions += [session] * len(chunk)
                positions += range(first, first + len(chunk))
                taken += chunk
                last = sent[session] == len(ids)
                wants += [every_position or (last and index == len(chunk) - 1) for index in range(len(chunk))]
            self._next_step += 1
            yield ActivationFrame(
                step=self._next_step,
                sessions=np.array(sessions, np.int64),
                positions=np.array(positions, np.int64),
                ids=np.array(taken, np.int32),
                wants_logits=np.array(wants, np.bool_),
                prefix=np.zeros((len(taken), 0), np.float32),
                blocks=np.zeros((len(taken), 0, 0), np.float32),
            )

    def _collect_all(self) -> None:
        while self._in_flight:
            self._collect_oldest()

    def _collect_oldest(self) -> None:
        """Wait for the oldest frame's answer, keep its logits, commit its ids; it stays in flight if interrupted."""
        frame, ticket = self._in_flight[0]
        answer = decode_logits(self._chain.collect(ticket))
        wanted = frame.wants_logits
        if answer.step != frame.step or not (
            np.array_equal(answer.sessions, frame.sessions[wanted])
            and np.array_equal(answer.positions, frame.positions[wanted])
        ):
            raise StepMismatch(f"step {frame.step} was answered by step {answer.step}, or for other positions")
        with held_signals():  # the stages have applied it: all of it is committed, or it is collected again
            self._in_flight.popleft()
            for session in np.unique(answer.sessions).tolist():
                self._answers[session].append(answer.logits[answer.sessions == session].copy())
            for session, low, high in frame.segments():
                self._sessions[session].committed.extend(frame.ids[low:high].tolist())
