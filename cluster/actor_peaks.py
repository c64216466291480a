"""Asking actors how much memory each has held at most: once, and no longer than a run's end may take."""

from __future__ import annotations

import time
from contextlib import suppress

from k3ray.cluster.actor_calls import ActorGone, all_actors
from k3ray.cluster.actor_chain import ActorChain

PEAK_S = 5.0  # actors that have not said their memory by then are left out
HURRIED_PEAK_S = 1.0  # of a run that is ending before its time


def peak_memory(chain: ActorChain, within_s: float = PEAK_S) -> dict[str, int]:
    """Return the most that each actor has held, by what it holds; who is gone or does not answer is left out."""
    asked = {}
    for actor in all_actors(chain):
        asked[chain.part_of(actor)] = chain.call_aside(actor, "peak_memory")
    found, ends = {}, time.monotonic() + within_s
    for part, ref in asked.items():
        with suppress(ActorGone):
            found[part] = int(chain.result(ref)) if chain.is_done(ref, max(0.0, ends - time.monotonic())) else 0
    return {part: nbytes for part, nbytes in found.items() if nbytes}
