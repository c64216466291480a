"""What an object ref of a call to an actor holds: its answer, or which kind of loss it was.

An actor that has died, an answer that went with its node or is stuck behind a broken link, and a call that was never
begun because what it was to be given is lost, are three things (actor_calls.py).
"""

from __future__ import annotations

from typing import Any

import ray

from k3ray.cluster.actor_calls import ActorGone, AnswerLost, InputLost

_ADVICE = "start the run again"


def answer_of(ref: Any) -> Any:
    """Wait for a call's answer; raises what the actor raised, ActorGone, AnswerLost, InputLost."""
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, ray.exceptions.RayError):  # it was to be given what a lost actor should have answered
            raise InputLost(f"a call had nothing to work on, as another actor was lost: {cause}") from None
        raise cause from None
    except ray.exceptions.ActorUnavailableError as error:
        raise AnswerLost(f"an actor of this run cannot be reached: {error}; {_ADVICE}") from None
    except ray.exceptions.RayActorError as error:
        raise ActorGone(f"an actor of this run ended unexpectedly: {error}; {_ADVICE}") from None
    except (ray.exceptions.ObjectLostError, ray.exceptions.NodeDiedError, ray.exceptions.WorkerCrashedError) as error:
        raise AnswerLost(f"what an actor of this run had answered is lost with its node: {error}; {_ADVICE}") from None
    except ray.exceptions.ActorUnschedulableError as error:
        raise ActorGone(f"an actor of this run has no node to run on: {error}; {_ADVICE}") from None
