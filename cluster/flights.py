"""The steps on their way down the chain: which stage has answered, and from where a step goes on after a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from k3ray.cluster.actor_calls import ActorGone, ActorId, Actors
from k3ray.cluster.step_log import StepLog, Stepped
from k3ray.workers.failure import Failure


@dataclass(slots=True, eq=False)
class Flight:
    """One step. tickets: per stage, None where the call has to be sent again. answered: by so many stages.

    last: the last stage's answer. failed: a stage refused it, which is an answer too.
    """

    step: Stepped
    tickets: list[Any]
    answered: int = 0
    last: pa.Buffer | None = field(default=None)
    failed: bool = False

    @property
    def is_finished(self) -> bool:
        """Whether every stage has answered."""
        return self.answered == len(self.tickets)


class Flights:
    """The steps that were sent and not collected, in the order in which they were sent."""

    def __init__(self, actors: Actors, log: StepLog) -> None:
        self._actors = actors
        self._log = log
        self._flights: list[Flight] = []

    def send(self, step: Stepped) -> Flight:
        """Send a step to all stages, each taking the answer of the one before."""
        flight = Flight(step, [None] * self._actors.num_stages)
        self._flights.append(flight)
        self._send_rest(flight)
        return flight

    def begin(self, flight: Flight) -> None:
        """Drop the steps before one that is collected: whoever sent them has given them up."""
        while self._flights and self._flights[0] is not flight:
            del self._flights[0]

    def answer(self, flight: Flight, message: pa.Buffer) -> None:
        """Note the answer of the stage that is next to answer: it is what the stage behind it gets."""
        flight.tickets[flight.answered] = None
        flight.answered += 1
        if flight.is_finished:
            flight.last = message
        else:
            self._log.learned(flight.step, flight.answered, message)

    def end(self, flight: Flight) -> None:
        """Forget a finished step."""
        self._flights.remove(flight)

    def clear(self) -> None:
        """Forget all steps."""
        self._flights.clear()

    def forget_session(self, session: int) -> None:
        """Forget the steps of a sequence that is closed."""
        self._flights = [flight for flight in self._flights if session not in flight.step.sessions]

    def answered(self) -> dict[int, int]:
        """Return by how many stages each step was answered, by its place in the log."""
        return {flight.step.place: flight.answered for flight in self._flights}

    def salvage(self, result_of: Callable[[ActorId, Any], Any]) -> set[ActorId]:
        """Gather every answer that the living stages still give; returns the stages found lost on the way."""
        lost = set()
        for flight in self._flights:
            while not (flight.is_finished or flight.failed or flight.tickets[flight.answered] is None):
                stage = ActorId("stage", flight.answered)
                try:
                    self.answer(flight, result_of(stage, flight.tickets[flight.answered]))
                except ActorGone:
                    lost.add(stage)
                    flight.tickets[flight.answered :] = [None] * (len(flight.tickets) - flight.answered)
                except Failure:
                    flight.failed = True
        return lost

    def resend(self) -> None:
        """Send every interrupted step on from the first stage that has not answered it."""
        for flight in self._flights:
            if not (flight.is_finished or flight.failed) and flight.tickets[flight.answered] is None:
                self._send_rest(flight)

    def _send_rest(self, flight: Flight) -> None:
        message: Any = flight.step.inputs[flight.answered]
        for stage in range(flight.answered, len(flight.tickets)):
            message = self._actors.call(ActorId("stage", stage), "apply", message)
            flight.tickets[stage] = message
