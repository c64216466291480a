"""The steps on their way down the chain: which stage has answered, and from where a step goes on after a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from k3ray.cluster.actor_calls import ActorGone, ActorId, Actors, AnswerLost, InputLost
from k3ray.cluster.step_log import StepLog, Stepped
from k3ray.workers.failure import Failure

MAX_AGAIN = 5  # times that a stage is asked for one answer before it counts as lost


@dataclass(slots=True, eq=False)
class Flight:
    """One step. tickets: per stage, None where the call has to be sent, or sent again. answered: by so many stages.

    last: the last stage's answer. failed: a stage refused it, which is an answer too. again: how often the stage that
    is next to answer was asked again without being replaced.
    """

    step: Stepped
    tickets: list[Any]
    answered: int = 0
    last: pa.Buffer | None = field(default=None)
    failed: bool = False
    again: int = 0

    @property
    def is_finished(self) -> bool:
        """Whether every stage has answered."""
        return self.answered == len(self.tickets)


class Flights:
    """The steps that were sent and not collected, in the order in which they were sent."""

    def __init__(
        self, actors: Actors, log: StepLog, is_cut: Callable[[ActorId, ActorId], bool] = lambda one, other: False
    ) -> None:
        """is_cut: whether two stages do not reach each other: what one answers reaches the other through the driver."""
        self._actors = actors
        self._is_cut = is_cut
        self._log = log
        self._flights: list[Flight] = []

    def send(self, step: Stepped) -> Flight:
        """Send a step to all stages, each taking the answer of the one before, up to a link that is cut."""
        flight = Flight(step, [None] * self._actors.num_stages)
        self._flights.append(flight)
        self._send_rest(flight)
        return flight

    def begin(self, flight: Flight) -> None:
        """Drop the steps before one that is collected: whoever sent them has given them up."""
        while self._flights and self._flights[0] is not flight:
            del self._flights[0]

    @property
    def are_sent(self) -> bool:
        """Whether all stages were sent every step: what is asked of them now stands behind it."""
        return not any(None in flight.tickets[flight.answered :] for flight in self._flights)

    def answer(self, flight: Flight, message: pa.Buffer) -> None:
        """Take the answer of the stage that is next to answer: it is what the stage behind it gets, or has got."""
        self._note(flight, message)
        if not flight.is_finished and flight.tickets[flight.answered] is None:
            self._send_rest(flight)

    def _note(self, flight: Flight, message: pa.Buffer) -> None:
        flight.tickets[flight.answered] = None
        flight.answered += 1
        flight.again = 0
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

    def take_back_after(self, lost: ActorGone, flight: Flight) -> bool:
        """Have a step sent on anew where the stage that was to answer it may live and can be asked again.

        A call that was not begun can be; of those that were, only the last step that a stage has applied gets its
        recorded answer. Not for ever: MAX_AGAIN.
        """
        flight.again += 1
        was_not_begun = isinstance(lost, InputLost)
        may_be_answered_again = isinstance(lost, AnswerLost) and flight is self._flights[-1]
        if flight.again > MAX_AGAIN or not (was_not_begun or may_be_answered_again):
            return False
        self.take_back(flight)
        return True

    def take_back(self, flight: Flight) -> None:
        """Have a step, and those behind it, sent on anew from the stage that is next to answer."""
        for later in self._flights[self._flights.index(flight) :]:
            if later.answered <= flight.answered:
                later.tickets[later.answered :] = [None] * (len(later.tickets) - later.answered)

    def salvage(self, result_of: Callable[[ActorId, Any], Any]) -> set[ActorId]:
        """Gather every answer that the living stages still give; returns the stages found lost on the way."""
        lost = set()
        for flight in self._flights:
            while not (flight.is_finished or flight.failed or flight.tickets[flight.answered] is None):
                stage = ActorId("stage", flight.answered)
                try:
                    self._note(flight, result_of(stage, flight.tickets[flight.answered]))
                except InputLost:
                    self.take_back(flight)  # what follows at this stage was refused, or would be: it came too early
                except ActorGone:
                    lost.add(stage)
                    flight.tickets[flight.answered :] = [None] * (len(flight.tickets) - flight.answered)
                except Failure:
                    flight.failed = True
        return lost

    def resend(self) -> range:
        """Send every interrupted step on from the first stage that has not answered it; returns who gets one.

        What was asked of these before stands in their queues in front of such a step, not behind it.
        """
        first = self._actors.num_stages
        for flight in self._flights:
            if not (flight.is_finished or flight.failed) and flight.tickets[flight.answered] is None:
                first = min(first, flight.answered)
                self._send_rest(flight)
        return range(first, self._actors.num_stages)

    def _send_rest(self, flight: Flight) -> None:
        kept = flight.step.inputs[flight.answered]
        assert kept is not None
        message: Any = kept.read()
        for stage in range(flight.answered, len(flight.tickets)):
            if stage > flight.answered and self._is_cut(ActorId("stage", stage - 1), ActorId("stage", stage)):
                break
            message = self._actors.call(ActorId("stage", stage), "apply", message)
            flight.tickets[stage] = message
