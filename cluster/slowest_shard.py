"""How long the slowest of several shards takes when experts are dealt out at random: the exact expectation."""

from __future__ import annotations

from functools import lru_cache
from math import factorial

import numpy as np


@lru_cache(maxsize=1024)
def expected_longest(parts: tuple[tuple[float, float], ...], draws: int, least: float = 0.0) -> float:
    """The expected time of the slowest of several that work at once on `draws` pieces dealt out at random.

    parts: (its share of the pieces, its seconds for one). least: what else takes so long meanwhile. Exact: P(none
    longer than t) is draws! times a coefficient of the product of the truncated exponential series of the shares; the
    expectation sums over the times t can be.
    """
    ends = {count * seconds for _, seconds in parts for count in range(draws + 1)}
    times = sorted({least, *(end for end in ends if end > least)})
    expected, before = 0.0, 0.0
    for place, time in enumerate(times):
        most = [draws if not seconds else min(draws, round(time / seconds * (1 + 1e-12) - 0.5 + 1e-9))
                for _, seconds in parts]  # fmt: skip
        series = np.array([1.0])
        for (share, _), count in zip(parts, most, strict=True):
            terms = np.array([share**power / factorial(power) for power in range(count + 1)])
            series = np.convolve(series, terms)[: draws + 1]
        within = float(series[draws]) * factorial(draws) if len(series) > draws else 0.0
        within = 1.0 if place == len(times) - 1 else min(1.0, within)
        expected += time * (within - before)
        before = within
    return expected
