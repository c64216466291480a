"""What actors have counted and met, added up over their processes: those that were lost as far as was asked in time."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from k3ray.cluster.actor_calls import ActorId
from k3ray.workers.io_counts import IoCounts

Ask = Callable[[ActorId, str], Any]


class KeptCounts:
    """The last known counters of every actor, and the sum of those whose processes are gone."""

    def __init__(self, actors: Collection[ActorId]) -> None:
        self._last = dict.fromkeys(actors, IoCounts())
        self._gone = IoCounts()
        self._damaged: set[tuple[int, int]] = set()

    def ask(self, ask: Ask) -> None:
        """Ask every actor."""
        for actor in self._last:
            self._last[actor] = ask(actor, "counts")
            self._damaged.update(ask(actor, "damaged_met"))

    def met(self, damaged: Collection[tuple[int, int]]) -> None:
        """Note the damaged experts that an answered step has used: they came with its answer."""
        self._damaged.update(damaged)

    def renewed(self, actor: ActorId, report: Any = None) -> None:
        """An actor's new process counts from zero."""
        self._gone += self._last[actor]
        self._last[actor] = IoCounts()

    @property
    def counts(self) -> IoCounts:
        """What all processes have read, as far as is known."""
        return sum(self._last.values(), self._gone)

    @property
    def damaged(self) -> list[tuple[int, int]]:
        """(layer, expert) of every damaged expert that was met, as far as is known."""
        return sorted(self._damaged)
