"""What Ray still has to give of each node's memory, what a run has it hold, and waiting for it: never in silence.

Ray counts what runs have declared, not what is used; a run that does not fit would wait until another one ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group

from k3ray.cluster.actor_calls import ActorLost
from k3ray.cluster.budget_plan import gigabytes
from k3ray.cluster.machine import MemoryLimits, memory_limits
from k3ray.workers.failure import Failure

MEMORY = "memory"
NODE_LABEL = "ray.io/node-id"  # Ray gives it to every node
SHARED = "the driver with what its processes share"
RAY_DECIDES = "Ray: its --memory, less what runs hold"
START_S = 180.0  # a process has to begin and import everything, on a machine that may be busy
LOOK_S = 2.0
LOOKS = 3  # in a row that find too little: Ray's figures lag behind


class MemoryTaken(Failure):
    """Memory that another run holds."""

    exit_code = 2


def memory_left() -> dict[str, int]:
    """Bytes that Ray can still give to actors, by node id; a node that was started without any has 0."""
    return {str(node): int(found.get(MEMORY, 0)) for node, found in available_resources_per_node().items()}


def limits_within_ray(node_id: str) -> MemoryLimits:
    """What this node has, no more than Ray can still give to actors on it."""
    limits, left = memory_limits(), memory_left().get(node_id)
    if left is None or limits.available_bytes <= left:
        return limits
    return MemoryLimits(left, RAY_DECIDES, limits.machine_bytes)


def hold_memory(nbytes_of: Mapping[str, int], node_names: Callable[[str], str] = str) -> None:
    """Have Ray count bytes of nodes, by their ids, as this run's until its job ends, however it ends.

    For what is no actor's: the driver, and what is on a node once. Raises MemoryTaken, as await_started.
    """
    asked = {reserve(node, nbytes): (SHARED, node, nbytes) for node, nbytes in nbytes_of.items() if nbytes}
    await_started(asked, node_names, wait=_wait_granted)


def reserve(node_id: str, nbytes: int) -> PlacementGroup:
    """Ask Ray for bytes of that node and no other, without waiting. No process is started for it."""
    return placement_group([{MEMORY: nbytes}], bundle_label_selector=[{NODE_LABEL: node_id}])


def await_started(
    starting: Mapping[Any, tuple[str, str | None, int | None]],
    node_names: Callable[[str], str] = str,
    left: Callable[[], Mapping[str, int]] = memory_left,
    wait: Callable[[list[Any], float], tuple[list[Any], list[Any]]] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Wait until all of these first calls are answered. starting: ref -> (the actor's name, its node, its bytes).

    wait: as ray.wait; another one for what is no call.

    Raises MemoryTaken as soon as Ray has too little memory for one that does not start, and ActorLost after START_S.
    What an answer raises is left to whoever asks for it.
    """
    wait = wait or _wait
    began, short, waiting = clock(), 0, list(starting)
    while waiting:
        _, waiting = wait(waiting, LOOK_S)
        lacking = _lacking([starting[ref] for ref in waiting], left())
        short = short + 1 if lacking else 0
        if lacking and short >= LOOKS:
            name, node, needed, found = lacking
            raise MemoryTaken(
                f"{name} is to have {gigabytes(needed)} on node {node_names(node)} and Ray has {gigabytes(found)} left "
                "to give there: another run holds it; wait for its end, or ask for less with --memory"
            )
        if waiting and clock() - began > START_S:
            names = ", ".join(starting[ref][0] for ref in waiting)
            raise ActorLost(f"{names}: not started after {START_S:g} s; see `ray status` and Ray's logs on their nodes")


def _lacking(
    waiting: list[tuple[str, str | None, int | None]], left: Mapping[str, int]
) -> tuple[str, str, int, int] | None:
    """(name, node, needed, left) of the first actor for which its node has too little."""
    for name, node, needed in waiting:
        if node is not None and needed is not None and left.get(node, needed) < needed:
            return name, node, needed, left[node]
    return None


def _wait(refs: list[Any], timeout_s: float) -> tuple[list[Any], list[Any]]:
    done, waiting = ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
    return done, waiting


def _wait_granted(groups: list[PlacementGroup], timeout_s: float) -> tuple[list[Any], list[Any]]:
    ends = time.monotonic() + timeout_s
    granted = [group.wait(round(max(0.0, ends - time.monotonic()))) for group in groups]
    pairs = list(zip(groups, granted, strict=True))
    return [group for group, there in pairs if there], [group for group, there in pairs if not there]
