"""Replaying a trace of expert requests against cache sizes: what a policy hits, and what no policy can exceed."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from k3ray.workers.cache.circle import CirclePolicy
from k3ray.workers.cache.policy import CachePolicy, CacheTooSmall, LruPolicy
from k3ray.workers.cache.trace import ExpertRequest

POLICIES: Mapping[str, Callable[[int], CachePolicy]] = {"lru": LruPolicy, "circle": CirclePolicy}
OPTIMUM = "optimum"


@dataclass(frozen=True, slots=True)
class Replay:
    """One cache size. hits: by policy, and the optimum's. tokens: how often the layers were descended."""

    capacity_bytes: int
    slots: int
    requests: int
    tokens: int
    expert_bytes: int
    hits: Mapping[str, int]

    def hit_rate(self, policy: str) -> float:
        """Return the share of requests that found their expert resident."""
        return self.hits[policy] / self.requests

    def bytes_per_token(self, policy: str) -> float:
        """Return what is read for a token on average, the filling of the empty cache included."""
        return (self.requests - self.hits[policy]) * self.expert_bytes / self.tokens


def simulate(requests: Sequence[ExpertRequest], capacities: Sequence[int], expert_bytes: int) -> list[Replay]:
    """Replay the requests from an empty cache of each capacity in bytes, with every policy and the optimum.

    A cache has as many slots as whole experts fit. Raises CacheTooSmall, before any replay, when a capacity has
    no room for the experts of one request.
    """
    widest = max(len(request.experts) for request in requests)
    for capacity in capacities:
        if capacity // expert_bytes < widest:
            raise CacheTooSmall(
                f"a capacity of {capacity:,} bytes holds {capacity // expert_bytes} experts of {expert_bytes:,} bytes, "
                f"one request needs {widest} at once: give {widest * expert_bytes:,} bytes or more"
            )
    layers = {request.layer for request in requests}
    distinct = {(request.layer, expert) for request in requests for expert in request.experts}
    num_requests = sum(len(request.experts) for request in requests)
    replays = []
    for capacity in capacities:
        slots = capacity // expert_bytes
        useful = min(slots, len(distinct))  # more change nothing
        hits = {name: replay(requests, policy(useful)) for name, policy in POLICIES.items()}
        hits[OPTIMUM] = optimum_hits(requests, useful)
        tokens = max(len(requests) // len(layers), 1)
        replays.append(Replay(capacity, slots, num_requests, tokens, expert_bytes, hits))
    return replays


def replay(requests: Sequence[ExpertRequest], policy: CachePolicy) -> int:
    """Return how many of the requested experts were resident."""
    return sum(placement.hit for request in requests for placement in policy.request(request.layer, request.experts))


def optimum_hits(requests: Sequence[ExpertRequest], slots: int) -> int:
    """Return what Belady's optimum hits: it knows the future, and keeps what is needed again soonest.

    It takes one expert at a time and may pass one through without keeping it, so it bounds every policy here: a
    policy has to hold all experts of a request at once.
    """
    keys = [(request.layer, expert) for request in requests for expert in request.experts]
    next_use = _next_uses(keys)
    due: set[tuple[int, int]] = set()  # resident, and needed again
    latest: list[tuple[int, tuple[int, int]]] = []  # a heap of (-use, expert): uses that are past stay at its bottom
    hits = 0
    for index, key in enumerate(keys):
        hits += key in due
        due.discard(key)
        if next_use[index] == len(keys):
            continue
        due.add(key)
        heapq.heappush(latest, (-next_use[index], key))
        while len(due) > slots:
            due.remove(heapq.heappop(latest)[1])
    return hits


def _next_uses(keys: Sequence[tuple[int, int]]) -> list[int]:
    """Return for every request the index of the next one for the same expert; their number where there is none."""
    following = [len(keys)] * len(keys)
    seen: dict[tuple[int, int], int] = {}
    for index in range(len(keys) - 1, -1, -1):
        following[index] = seen.get(keys[index], len(keys))
        seen[keys[index]] = index
    return following
