"""The policy made for layers visited in a circle: keep what is likely to be needed, and evict what is needed last.

An expert's layer comes round once a token, so the next use of everything in a layer lies at the same, known
distance, and keeping an expert costs its slot for that long. The policy evicts the lowest estimate of reuse per
distance. In the steady state those are the poorest experts of the layers just computed: their slots are the small
transit area through which the misses of every layer pass, and the experts worth keeping are not disturbed.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from k3ray.workers.cache.policy import Placement, check_request
from k3ray.workers.cache.reuse import ReuseEstimate, ReuseMemory


@dataclass(slots=True)
class _LayerResidents:
    """visited: when the layer was computed last. ranked: (value, expert), the best first, or not known."""

    visited: int = 0
    experts: set[int] = field(default_factory=set)
    ranked: list[tuple[float, int]] | None = None


class CirclePolicy:
    """A request of k experts costs O(experts of the layer + layers + k log layers)."""

    def __init__(self, slots: int, memory: ReuseMemory | None = None) -> None:
        self.slots = slots
        self._reuse = ReuseEstimate(memory or ReuseMemory())
        self._free = list(range(slots))[::-1]
        self._slot_of: dict[tuple[int, int], int] = {}
        self._layers: dict[int, _LayerResidents] = {}
        self._visit = 0  # counts the changes of layer
        self._layer: int | None = None
        self._requests_of_visit = 0
        self._requests_of_previous_visit = 0
        self._came_round = False

    def request(self, layer: int, experts: Sequence[int]) -> list[Placement]:
        """See CachePolicy."""
        check_request(experts, self.slots)
        found = self._enter(layer)
        self._reuse.observe(layer, experts, max(self.slots // len(self._layers), 1))
        needed = set(experts)
        hits = needed & found.experts
        found.experts -= needed  # out of the eviction's sight
        found.ranked = None
        self._evict(len(needed) - len(hits) - len(self._free))
        for expert in experts:
            if expert not in hits:
                self._slot_of[layer, expert] = self._free.pop()
        found.experts |= needed
        found.ranked = None
        return [Placement(expert, self._slot_of[layer, expert], expert in hits) for expert in experts]

    def resident(self, layer: int, expert: int) -> int | None:
        """See CachePolicy."""
        return self._slot_of.get((layer, expert))

    def forget(self, layer: int, expert: int) -> None:
        """See CachePolicy."""
        slot = self._slot_of.pop((layer, expert), None)
        if slot is not None:
            self._free.append(slot)
            self._layers[layer].experts.discard(expert)
            self._layers[layer].ranked = None

    def _enter(self, layer: int) -> _LayerResidents:
        if layer != self._layer:
            self._layer = layer
            self._visit += 1
            self._requests_of_previous_visit, self._requests_of_visit = self._requests_of_visit, 0
            self._came_round |= layer in self._layers
        self._requests_of_visit += 1
        found = self._layers.setdefault(layer, _LayerResidents())
        found.visited = self._visit
        return found

    def _evict(self, count: int) -> None:
        """Free so many slots, if any: the least value per distance first."""
        if count <= 0:
            return
        poorest = [self._poorest(layer) for layer, found in self._layers.items() if found.experts]
        heapq.heapify(poorest)
        for _ in range(count):
            layer = poorest[0][-1]
            found = self._layers[layer]
            _, expert = self._ranked(layer).pop()
            found.experts.remove(expert)
            self._free.append(self._slot_of.pop((layer, expert)))
            if found.experts:
                heapq.heapreplace(poorest, self._poorest(layer))
            else:
                heapq.heappop(poorest)

    def _ranked(self, layer: int) -> list[tuple[float, int]]:
        found = self._layers[layer]
        if found.ranked is None:
            held = list(found.experts)
            found.ranked = sorted(zip(self._reuse.values(layer, held), held, strict=True), reverse=True)
        return found.ranked

    def _poorest(self, layer: int) -> tuple[bool, float, float, int]:
        """Return the sort key of the layer's poorest expert: what keeping it is worth, per distance to its next use."""
        value, _ = self._ranked(layer)[-1]
        distance = self._distance(layer)
        return self._comes_again(layer), value / distance, -distance, layer

    def _comes_again(self, layer: int) -> bool:
        """Whether the layer's next request is the very next one: it is being computed token by token."""
        repeated = self._requests_of_visit > 1 or self._requests_of_previous_visit > 1
        return repeated and layer == self._layer

    def _distance(self, layer: int) -> float:
        """Return the share of the circle until the layer's next visit, in (0, 1]; 1 while the circle is unknown."""
        if not self._came_round:
            return 1.0
        around = len(self._layers)
        return 1.0 - (self._visit - self._layers[layer].visited) % around / around
