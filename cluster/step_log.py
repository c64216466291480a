"""What has to be told to a stage that lost its memory: the openings, steps and closings since its restore point.

The bytes of the messages are the log's own, on the driver's disk, so that the process that made them may be lost as
well. It neither calls nor decides.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from k3ray.cluster.kept_messages import KeptMessage, MessageKeeper
from k3ray.workers.frames import decode_activations


@dataclass(frozen=True, slots=True)
class Opened:
    """A sequence began."""

    place: int
    session: int
    capacity: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """A sequence began from a saved state. snapshots: per stage."""

    place: int
    session: int
    capacity: int
    snapshots: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Closed:
    """A sequence was forgotten."""

    place: int
    session: int


@dataclass(frozen=True, slots=True)
class Stepped:
    """A step was sent. inputs: per stage the message it gets, None while unknown or when no longer needed."""

    place: int
    tokens: int
    sessions: frozenset[int]
    inputs: list[KeptMessage | None]


@dataclass(frozen=True, slots=True)
class Restored:
    """A sequence as it was at a restore point."""

    session: int
    capacity: int
    snapshot: Any


Event = Opened | Loaded | Closed | Stepped
Replayed = Restored | Opened | Closed | Stepped


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """A stage's state after the events up to `place`: a snapshot of each sequence that was open."""

    place: int = 0
    sequences: Mapping[int, Restored] = field(default_factory=dict)


class StepLog:
    """One order of events for all stages, and where in it each stage can begin."""

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._keeper = MessageKeeper()
        self._place = 0
        self._events: list[Event] = []
        self._points = [RestorePoint() for _ in range(num_stages)]
        self._touched: dict[int, int] = {}  # session -> place of its last event
        self.open: dict[int, int] = {}  # session -> capacity
        self.num_steps = 0  # since the beginning
        self.keeps_everything = False

    @property
    def place(self) -> int:
        """Where the last event stands."""
        return self._place

    @property
    def events(self) -> tuple[Event, ...]:
        """The events that some stage may have to be told again."""
        return tuple(self._events)

    def held_bytes(self) -> int:
        """Return the size of all messages held."""
        inputs = (message for event in self._events if isinstance(event, Stepped) for message in event.inputs)
        return sum(message.size for message in inputs if message is not None)

    def steps_since(self, place: int) -> int:
        """Return how many steps were sent after a place."""
        return sum(isinstance(event, Stepped) and event.place > place for event in self._events)

    def point(self, stage: int) -> RestorePoint:
        """Return where a stage can begin."""
        return self._points[stage]

    def opened(self, session: int, capacity: int) -> None:
        """Note that a sequence begins."""
        self._events.append(Opened(self._next_place(session), session, capacity))
        self.open[session] = capacity

    def loaded(self, session: int, capacity: int, snapshots: tuple[Any, ...]) -> None:
        """Note that a sequence begins from a saved state."""
        self._events.append(Loaded(self._next_place(session), session, capacity, snapshots))
        self.open[session] = capacity

    def not_opened(self, session: int) -> None:
        """Take back the last opening: the stages refused it."""
        del self._events[-1]
        self.open.pop(session, None)

    def closed(self, session: int) -> None:
        """Note that a sequence is forgotten; with none left open there is nothing to tell anybody."""
        if self.open.pop(session, None) is None:
            return
        self._events.append(Closed(self._next_place(session), session))
        self._touched.pop(session, None)
        if not self.open and not self.keeps_everything:
            self._events.clear()
            self._keeper.forget()
            self._points = [RestorePoint(self._place) for _ in range(self._num_stages)]

    def stepped(self, message: pa.Buffer) -> Stepped:
        """Note a step that is sent to the first stage."""
        frame = decode_activations(message)
        sessions = frozenset(int(session) for session in np.unique(frame.sessions))
        inputs: list[KeptMessage | None] = [self._keeper.keep(message), *[None] * (self._num_stages - 1)]
        self.num_steps += 1
        step = Stepped(self._next_place(*sessions), len(frame.ids), sessions, inputs)
        self._events.append(step)
        return step

    def learned(self, step: Stepped, stage: int, message: pa.Buffer) -> None:
        """Keep a copy of what a stage gets in a step, unless its restore point lies behind that."""
        if step.place > self._points[stage].place:
            step.inputs[stage] = self._keeper.keep(message)

    def changed_since_point(self, stage: int) -> list[int]:
        """Return the open sequences whose state in a stage is not in its restore point."""
        point = self._points[stage]
        return [
            session
            for session in self.open
            if session not in point.sequences or self._touched.get(session, 0) > point.place
        ]

    def keep_point(self, stage: int, place: int, snapshots: Mapping[int, Restored]) -> None:
        """Move a stage's restore point, and let go of what nobody needs any more.

        snapshots: of the sequences that had changed; the others' are taken from the point before.
        """
        before = self._points[stage]
        if place < before.place:
            return  # everything was closed while the snapshot was on its way
        gone = {event.session for event in self._events if isinstance(event, Closed) and event.place <= place}
        kept = {session: old for session, old in before.sequences.items() if session not in gone}
        self._points[stage] = RestorePoint(place, {**kept, **snapshots})
        for event in self._events:
            if isinstance(event, Stepped) and event.place <= place:
                event.inputs[stage] = None
        behind_all = min(point.place for point in self._points)
        self._events = [event for event in self._events if event.place > behind_all]

    def replay(self, stage: int, unanswered: Collection[int] = ()) -> tuple[Replayed, ...]:
        """Return what brings an empty stage to where it was, in order.

        unanswered: places of the steps that the stage has not answered; they are not part of it.
        """
        point = self._points[stage]
        told: list[Replayed] = list(point.sequences.values())
        for event in self._events:
            if event.place <= point.place:
                continue
            if isinstance(event, Loaded):
                told.append(Restored(event.session, event.capacity, event.snapshots[stage]))
            elif not isinstance(event, Stepped) or _is_known(event, stage, unanswered):
                told.append(event)
        return tuple(told)

    def _next_place(self, *sessions: int) -> int:
        self._place += 1
        self._touched.update(dict.fromkeys(sessions, self._place))
        return self._place


def _is_known(step: Stepped, stage: int, unanswered: Collection[int]) -> bool:
    return step.inputs[stage] is not None and step.place not in unanswered
