"""How fast one actor's threads go over weights in memory: from what was measured with fewer and with all threads."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from k3ray.cluster.seats import Seat
from k3ray.cluster.topology import NodeSpeeds

Kind = Literal["trunk", "experts"]


def rate_of(kind: Kind, seat: Seat, threads: int) -> float | None:
    """Bytes a second by so many threads of a seat while nobody else is at work; None where it was not measured.

    Between measured numbers of threads it is on the straight line; where only all threads were measured each has its
    even share. A seat that is bound to a memory node has no more than that node's part.
    """
    whole = seat.speeds.trunk if kind == "trunk" else seat.speeds.experts
    if whole is None:
        return None
    if not seat.speeds.by_threads:
        return whole * min(1.0, threads / seat.threads)
    found = _on_line(_points(kind, seat.speeds), threads)
    return found if seat.numa is None else min(found, whole)


def rate_together(kind: Kind, seat: Seat, threads: int, together: int) -> float | None:
    """The same for one of several actors of the node that are at work at once, with `together` threads in all."""
    alone = rate_of(kind, seat, threads)
    if alone is None or not seat.speeds.by_threads or together <= threads:
        return alone
    return min(alone, _on_line(_points(kind, seat.speeds), together) * threads / together)


def _points(kind: Kind, speeds: NodeSpeeds) -> list[tuple[int, float]]:
    return [(one.threads, one.trunk if kind == "trunk" else one.experts) for one in speeds.by_threads]


def _on_line(points: list[tuple[int, float]], threads: int) -> float:
    """Through (0, 0) and the points, flat after the last."""
    for (low, slow), (high, fast) in pairwise([(0, 0.0), *points]):
        if threads <= high:
            return slow + (fast - slow) * (threads - low) / (high - low)
    return points[-1][1]
