"""How likely an expert is to be requested again when its layer comes round: several views of the past, the best leads.

It knows nothing of slots: experts that were evicted are remembered like those that stayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ReuseMemory:
    """The constants of the estimate; docs/decisions/0004 explains them, docs/experiments/expert-cache.md varies them.

    paces: what a request still counts for after each later request of its layer; 0.98 is a memory of 50 tokens.
    views: each a weighted sum of the paces; the first one leads until another does better.
    last_weight: what the last expert of a request counts for, where the first, best scored one counts 1.
    lead: a view takes over when it is ahead by so many standard deviations of its distance to the leader in a round.
    window: over how many rounds, each one token in all layers, successes are counted.
    """

    paces: tuple[float, ...] = (0.2, 0.9, 0.98)
    views: tuple[tuple[float, ...], ...] = ((1, 0, 0), (1, 0, 1), (0, 1, 0), (0, 0, 1))
    last_weight: float = 0.25
    lead: float = 2.0
    window: int = 20


@dataclass(slots=True)
class _LayerPast:
    """rates: (paces, experts). values: (views, experts). bars: (views,) the value that a view's favourites reach."""

    rates: Float64Array
    values: Float64Array
    bars: Float64Array


class ReuseEstimate:
    """The past of every layer and the view that leads in all of them."""

    def __init__(self, memory: ReuseMemory) -> None:
        self._memory = memory
        self._paces = np.array(memory.paces)[:, None]  # (paces, 1)
        self._views = np.array(memory.views, np.float64)  # (views, paces)
        self._layers: dict[int, _LayerPast] = {}
        self._layers_of_round: set[int] = set()
        self._successes_of_round = np.zeros(len(self._views))
        self._successes = np.zeros(len(self._views))
        self._square_distances = np.zeros((len(self._views), len(self._views)))
        self.leader = 0

    def values(self, layer: int, experts: Sequence[int]) -> list[float]:
        """Return what the leading view holds of experts that were requested before: a share of requests, 0 to 2."""
        found: list[float] = self._layers[layer].values[self.leader, list(experts)].tolist()
        return found

    def observe(self, layer: int, experts: Sequence[int], favourites: int) -> None:
        """Take in a request. favourites: how many experts of a layer a view would keep, to be judged by."""
        if layer in self._layers_of_round:
            self._end_round()
        self._layers_of_round.add(layer)
        chosen = np.fromiter(experts, np.intp, len(experts))
        past = self._past(layer, int(chosen.max(initial=0)) + 1)
        values = past.values[:, chosen]
        self._successes_of_round += ((values > 0) & (values >= past.bars[:, None])).sum(axis=1)
        weights = np.linspace(1.0, self._memory.last_weight, len(chosen))
        past.rates *= self._paces
        past.rates[:, chosen] += (1.0 - self._paces) * weights
        np.matmul(self._views, past.rates, out=past.values)
        bar = max(past.values.shape[1] - favourites, 0)
        past.bars = np.partition(past.values, bar, axis=1)[:, bar].copy()

    def _end_round(self) -> None:
        """Judge the views. A token is the unit: what is odd about it shows in all layers, and proves nothing twice."""
        found = self._successes_of_round
        fading = 1.0 - 1.0 / self._memory.window
        self._successes = fading * self._successes + found
        self._square_distances = fading * self._square_distances + (found[:, None] - found) ** 2
        best = int(np.argmax(self._successes))
        ahead = self._successes[best] - self._successes[self.leader]
        if ahead > self._memory.lead * np.sqrt(self._square_distances[best, self.leader]):
            self.leader = best
        self._successes_of_round = np.zeros(len(self._views))
        self._layers_of_round.clear()

    def _past(self, layer: int, num_experts: int) -> _LayerPast:
        past = self._layers.get(layer)
        if past is None:
            num_views, num_paces = self._views.shape
            past = _LayerPast(
                np.zeros((num_paces, num_experts)), np.zeros((num_views, num_experts)), np.zeros(num_views)
            )
            self._layers[layer] = past
        missing = num_experts - past.rates.shape[1]
        if missing > 0:
            wider = max(missing, past.rates.shape[1])  # doubling, so that growing stays cheap
            past.rates = np.pad(past.rates, ((0, 0), (0, wider)))
            past.values = np.pad(past.values, ((0, 0), (0, wider)))
        return past
