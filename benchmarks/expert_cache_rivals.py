"""Other policies that were tried for the expert cache, each as a function from requests and slots to hits."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from k3ray.workers.cache.circle import CirclePolicy
from k3ray.workers.cache.reuse import ReuseMemory
from k3ray.workers.cache.simulate import replay
from k3ray.workers.cache.trace import ExpertRequest

Rival = Callable[[Sequence[ExpertRequest], int], int]
Key = tuple[int, int]


def equal_quota(requests: Sequence[ExpertRequest], slots: int) -> int:
    """Every layer keeps as many; its last token's best scored first. Passing misses through costs it no slots."""
    layers = {request.layer for request in requests}
    quota = slots // len(layers)
    kept: dict[int, list[int]] = {layer: [] for layer in layers}
    hits = 0
    for request in requests:
        before = kept[request.layer]
        hits += sum(expert in before for expert in request.experts)
        kept[request.layer] = [*request.experts, *(one for one in before if one not in request.experts)][:quota]
    return hits


def s3_fifo(requests: Sequence[ExpertRequest], slots: int) -> int:
    """A small queue of newcomers (a tenth), a main queue of those asked for again, a ghost queue of those sent away."""
    small: deque[Key] = deque()
    main: deque[Key] = deque()
    ghosts: OrderedDict[Key, None] = OrderedDict()
    asked: dict[Key, int] = {}
    hits = 0
    for key in _keys(requests):
        if key in asked:
            hits += 1
            asked[key] = min(asked[key] + 1, 3)
            continue
        while len(asked) >= slots:
            newcomers = len(small) > slots // 10 or not main
            queue = small if newcomers else main
            victim = queue.popleft()
            if asked[victim]:
                asked[victim] = 0 if newcomers else asked[victim] - 1
                main.append(victim)
                continue
            del asked[victim]
            if newcomers:
                ghosts[victim] = None
                if len(ghosts) > slots:
                    ghosts.popitem(last=False)
        known = key in ghosts
        ghosts.pop(key, None)
        (main if known else small).append(key)
        asked[key] = 0
    return hits


def arc(requests: Sequence[ExpertRequest], slots: int) -> int:
    """Adaptive replacement: a list seen once, a list seen again, and their ghosts move the border between them."""
    once: OrderedDict[Key, None] = OrderedDict()
    again: OrderedDict[Key, None] = OrderedDict()
    once_ghosts: OrderedDict[Key, None] = OrderedDict()
    again_ghosts: OrderedDict[Key, None] = OrderedDict()
    target = hits = 0

    def make_room(for_again: bool) -> None:
        if len(once) + len(again) < slots:
            return
        from_once = once and (len(once) > target or (for_again and len(once) == target) or not again)
        source, ghosts = (once, once_ghosts) if from_once else (again, again_ghosts)
        ghosts[source.popitem(last=False)[0]] = None

    for key in _keys(requests):
        if key in once or key in again:
            hits += 1
            once.pop(key, None)
            again.pop(key, None)
        elif key in once_ghosts:
            target = min(slots, target + max(len(again_ghosts) // len(once_ghosts), 1))
            make_room(False)
            del once_ghosts[key]
        elif key in again_ghosts:
            target = max(0, target - max(len(once_ghosts) // len(again_ghosts), 1))
            make_room(True)
            del again_ghosts[key]
        else:
            make_room(False)
            once[key] = None
            while len(once) + len(once_ghosts) > slots and once_ghosts:
                once_ghosts.popitem(last=False)
            while len(once_ghosts) + len(again_ghosts) > slots and again_ghosts:
                again_ghosts.popitem(last=False)
            continue
        again[key] = None
    return hits


def one_view(pace: float, last_weight: float = 0.25) -> Rival:
    """The circle policy with one memory instead of several: pace 0 is the last token, 1 counts for ever."""
    memory = ReuseMemory(paces=(pace,), views=((1,),), last_weight=last_weight)
    return lambda requests, slots: replay(requests, CirclePolicy(slots, memory))


class BlindToDistance(CirclePolicy):
    """The circle policy that evicts the least estimate wherever its layer is."""

    def _distance(self, layer: int) -> float:
        return 1.0


class DistanceFromTheStart(CirclePolicy):
    """The circle policy that takes the distance into account before it has seen a whole circle."""

    def _enter(self, layer: int):  # type: ignore[no-untyped-def]
        self._came_round = True
        return super()._enter(layer)


RIVALS: dict[str, Rival] = {
    "equal quota per layer": equal_quota,
    "S3-FIFO": s3_fifo,
    "ARC": arc,
    "last token only": one_view(1e-9),
    "last token only, rank ignored": one_view(1e-9, last_weight=1.0),
    "pace 0.2 only": one_view(0.2),
    "pace 0.9 only": one_view(0.9),
    "pace 0.98 only": one_view(0.98),
    "blind to distance": lambda requests, slots: replay(requests, BlindToDistance(slots)),
    "distance from the start": lambda requests, slots: replay(requests, DistanceFromTheStart(slots)),
}


def _keys(requests: Sequence[ExpertRequest]) -> list[Key]:
    return [(request.layer, expert) for request in requests for expert in request.experts]
