"""The driver: owns the sessions and what each has committed, cuts tokens into steps, sends them down the stages.

It moves no activations, and knows neither text nor sampling.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from k3ray.workers.failure import Failure
from k3ray.workers.frames import STEP_TOKENS, ActivationFrame, decode_logits, encode_activations

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

    def submit(self, message: pa.Buffer) -> Any:
        """Send a frame down the chain without waiting; returns a ticket."""
        ...

    def collect(self, ticket: Any) -> pa.Buffer:
        """Wait for the last stage's answer to a ticket."""
        ...

    def damaged_met(self) -> list[tuple[int, int]]:
        """Return (layer, expert) of every damaged expert used so far."""
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

    def open(self, capacity: int) -> int:
        """Begin an empty sequence of at most capacity positions; returns its session number."""
        session = self._next_session
        self._next_session += 1
        self._chain.open_sequence(session, capacity)
        self._sessions[session] = Session(session, capacity, [])
        return session

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
        leaves the sessions of that step unusable; their committed ids are unchanged.
        """
        answers: dict[int, list[Float32Array]] = {session: [] for session in tokens}
        in_flight: deque[tuple[ActivationFrame, Any]] = deque()
        for frame in self._frames(tokens, every_position):
            in_flight.append((frame, self._chain.submit(encode_activations(frame))))
            if len(in_flight) > self._chain.num_stages:  # a stage has one frame at work and one waiting
                self._collect(*in_flight.popleft(), answers)
        while in_flight:
            self._collect(*in_flight.popleft(), answers)
        for session, ids in tokens.items():
            self._sessions[session].committed.extend(ids)
        return {session: np.concatenate(parts) for session, parts in answers.items()}

    def _frames(self, tokens: Mapping[int, Sequence[int]], every_position: bool) -> Iterator[ActivationFrame]:
        sent = dict.fromkeys(tokens, 0)
        while any(sent[session] < len(ids) for session, ids in tokens.items()):
            sessions: list[int] = []
            positions: list[int] = []
            taken: list[int] = []
            wants: list[bool] = []
            for session, ids in tokens.items():
                chunk = ids[sent[session] : sent[session] + self._prompt_chunk]
                first = len(self._sessions[session].committed) + sent[session]
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

    def _collect(self, frame: ActivationFrame, ticket: Any, answers: dict[int, list[Float32Array]]) -> None:
        answer = decode_logits(self._chain.collect(ticket))
        wanted = frame.wants_logits
        if answer.step != frame.step or not (
            np.array_equal(answer.sessions, frame.sessions[wanted])
            and np.array_equal(answer.positions, frame.positions[wanted])
        ):
            raise StepMismatch(f"step {frame.step} was answered by step {answer.step}, or for other positions")
        for session in np.unique(answer.sessions).tolist():
            answers[session].append(answer.logits[answer.sessions == session].copy())
