"""Waiting for actors that load their parts, which may take minutes: each is asked meanwhile whether it lives.

What is lost before the run has begun ends it; nothing is replaced yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from k3ray.cluster.actor_calls import ActorId, ActorLost, Actors

LOOK_S = 0.5  # between two looks
SILENT_S = 300.0  # without an answer: not started, stopped, or its machine gone


def loaded_in_turn(
    actors: Actors,
    loads: Mapping[ActorId, Any],
    silent_s: float = SILENT_S,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[ActorId, Any]]:
    """Yield each actor with what its load answered, as they come. loads: the tickets.

    Raises what loading raises, ActorGone, and ActorLost for an actor that does not even say that it lives.
    """
    waiting, asked = dict(loads), dict[ActorId, tuple[Any, float]]()
    while waiting:
        for actor in [one for one, ticket in waiting.items() if actors.is_done(ticket, 0.0)]:
            yield actor, actors.result(waiting.pop(actor))
        for actor in waiting:
            if actor not in asked or actors.is_done(asked[actor][0], 0.0):
                asked[actor] = actors.call_aside(actor, "ping"), clock()
            elif clock() - asked[actor][1] > silent_s:
                actors.kill(actor)
                raise ActorLost(
                    f"{actor} does not answer for {silent_s:g} s while it loads its part: is its process stopped, its "
                    "node out of memory or its link cut? Start the run again"
                )
        for ticket in list(waiting.values())[:1]:
            actors.is_done(ticket, LOOK_S)
