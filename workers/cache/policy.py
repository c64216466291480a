"""What a cache of experts asks of a policy, and the policy to compare with: least recently used.

A policy decides which expert is in which slot. It knows nothing of bytes, files or threads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from k3ray.workers.counted import counted
from k3ray.workers.failure import Failure


class CacheTooSmall(Failure):
    """A request needs more experts at once than the cache has slots."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one requested expert is. hit: it is there already; otherwise it has to be read into the slot."""

    expert: int
    slot: int
    hit: bool


class CachePolicy(Protocol):
    """Gives the experts of one request their slots; what it evicts is never needed by the same request."""

    slots: int

    def request(self, layer: int, experts: Sequence[int]) -> list[Placement]:
        """Return a placement for each of the experts, in their order; all of them are resident afterwards.

        experts: distinct, the one most worth keeping first: in descending selection score for one token, and for
        the union of several tokens the last token's first. Raises CacheTooSmall when they are more than the slots;
        nothing has changed then.
        """

    def resident(self, layer: int, expert: int) -> int | None:
        """Return the expert's slot, or None; asking changes nothing."""

    def forget(self, layer: int, expert: int) -> None:
        """Free the slot of an expert whose read failed; one that is not resident is ignored."""


def check_request(experts: Sequence[int], slots: int) -> None:
    """Refuse a request that cannot be held whole."""
    assert len(set(experts)) == len(experts), f"an expert twice in one request: {list(experts)}"
    if len(experts) > slots:
        raise CacheTooSmall(
            f"a request for {counted(len(experts), 'expert')} at once does not fit into {counted(slots, 'slot')}: "
            "give the expert cache more memory, or run fewer tokens at a time"
        )


class LruPolicy:
    """Evicts the expert whose last request is the longest ago."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free = list(range(slots))[::-1]
        self._slot_of: OrderedDict[tuple[int, int], int] = OrderedDict()  # the longest unused first

    def request(self, layer: int, experts: Sequence[int]) -> list[Placement]:
        """See CachePolicy."""
        check_request(experts, self.slots)
        hits = {expert for expert in experts if (layer, expert) in self._slot_of}
        for expert in experts:
            if expert in hits:
                self._slot_of.move_to_end((layer, expert))
        for expert in experts:
            if expert not in hits:
                slot = self._free.pop() if self._free else self._slot_of.popitem(last=False)[1]
                self._slot_of[layer, expert] = slot
        return [Placement(expert, self._slot_of[layer, expert], expert in hits) for expert in experts]

    def resident(self, layer: int, expert: int) -> int | None:
        """See CachePolicy."""
        return self._slot_of.get((layer, expert))

    def forget(self, layer: int, expert: int) -> None:
        """See CachePolicy."""
        slot = self._slot_of.pop((layer, expert), None)
        if slot is not None:
            self._free.append(slot)
