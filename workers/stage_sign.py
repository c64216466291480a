"""What a stage says of itself when it is asked aside: since when it has no work, and which shards it does not reach."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UnreachedShard:
    """A shard whose answer has been awaited for so many seconds, and that cannot be reached.

    refused: in words, why. before: it was reached by this stage once.
    """

    shard: int
    seconds: float
    refused: str
    before: bool


@dataclass(frozen=True, slots=True)
class StageSign:
    """A sign of life. idle_s: for so long it has had nothing to do; 0.0 while it is at work."""

    idle_s: float = 0.0
    unreached: tuple[UnreachedShard, ...] = ()


class Idleness:
    """Since when a process has had nothing to do. One thread works, any may ask."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = clock()

    @property
    def seconds(self) -> float:
        """How long; 0.0 while it is at work."""
        since = self._since
        return 0.0 if since is None else self._clock() - since

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """It is at work meanwhile."""
        self._since = None
        try:
            yield
        finally:
            self._since = self._clock()
