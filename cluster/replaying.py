"""Telling a new stage what its predecessor was told, in order; the answers have to be the same bits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from k3ray.cluster.actor_calls import ActorId, ActorLost, Actors
from k3ray.cluster.recovery_plan import agrees
from k3ray.cluster.step_log import Closed, Opened, Replayed, Restored, Stepped
from k3ray.workers.failure import Failure

ResultOf = Callable[[ActorId, Any], Any]
AHEAD = 4  # calls sent before the first of them is answered: bounds what is on its way


class ReplayDiffers(Failure):
    """A stage that repeats a step and gives other bits than the first time."""


def repeat(actors: Actors, stage: ActorId, replay: Sequence[Replayed], result_of: ResultOf) -> None:
    """Bring an empty stage to where its predecessor was; raises ActorGone, ReplayDiffers."""
    pending: deque[tuple[Replayed, Any]] = deque()
    for told in replay:
        if isinstance(told, Restored):
            restore(actors, stage, told, result_of)
            continue
        pending.append((told, _call(actors, stage, told)))
        if len(pending) == AHEAD:
            _check(stage, *pending.popleft(), result_of)
    while pending:
        _check(stage, *pending.popleft(), result_of)


def restore(actors: Actors, stage: ActorId, saved: Restored, result_of: ResultOf) -> None:
    """Open a sequence from its snapshot, one piece on its way at a time."""
    for piece in saved.snapshot.pieces():
        result_of(stage, actors.call(stage, "restore_piece", saved.session, piece, saved.capacity))
    result_of(stage, actors.call(stage, "finish_restore", saved.session))


def _call(actors: Actors, stage: ActorId, told: Opened | Closed | Stepped) -> Any:
    if isinstance(told, Opened):
        return actors.call(stage, "open_sequence", told.session, told.capacity)
    if isinstance(told, Closed):
        return actors.call(stage, "close_sequence", told.session)
    message = told.inputs[stage.number]
    assert message is not None
    return actors.call(stage, "apply", message.read())


def _check(stage: ActorId, told: Replayed, ticket: Any, result_of: ResultOf) -> None:
    try:
        answer = result_of(stage, ticket)
    except ActorLost:
        raise
    except Failure:
        return  # the predecessor failed in it as well, and the driver knows
    if not agrees(told, stage.number, answer):
        raise ReplayDiffers(
            f"{stage} repeated a step and gave other bits than before it was lost: the checkpoint's files or the "
            "machine cannot be trusted; nothing after this step is used"
        )
