"""Real actors whose processes get a signal at a chosen call: for the tests on Ray and for scripts/fault_matrix."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from k3ray.cluster.actor_calls import ActorGone, ActorId
from k3ray.cluster.actor_chain import ActorChain

GEN, CHUNK = 8, 3
PROMPT = [84, 197, 179, 385, 423, 346, 143, 141, 51, 271]
PREFILL = 4  # steps of the prompt
MOMENTS = {"prefill": 2, "first decode": PREFILL + 1, "fifth decode": PREFILL + 5, "last decode": PREFILL + GEN - 1}


@dataclass(frozen=True, slots=True)
class RayFault:
    """At the nth call of a method at an actor, as it is sent, the victim's process gets a signal."""

    at: ActorId
    method: str
    nth: int
    victim: ActorId
    signal: int = signal.SIGKILL


class FaultyActors:
    """An ActorChain (cluster/actor_calls.py, Actors) with faults. signals: how many were sent."""

    def __init__(self, chain: ActorChain, faults: Sequence[RayFault]) -> None:
        self._chain = chain
        self._faults = list(faults)
        self._calls: Counter[tuple[ActorId, str]] = Counter()
        self.signals = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chain, name)

    def call(self, actor: ActorId, method: str, *arguments: Any) -> Any:
        self._calls[actor, method] += 1
        due = [
            one
            for one in self._faults
            if (one.at, one.method) == (actor, method) and one.nth <= self._calls[actor, method]
        ]
        pids = {fault: self._pid(fault.victim) for fault in due}
        ticket = self._chain.call(actor, method, *arguments)
        for fault, pid in pids.items():
            if pid is not None:  # else it is dead already, and its turn comes when it is replaced
                os.kill(pid, fault.signal)
                self.signals += 1
                self._faults.remove(fault)
        return ticket

    def _pid(self, actor: ActorId) -> int | None:
        try:
            return int(self._chain.result(self._chain.call_aside(actor, "ping")))
        except ActorGone:
            return None


def cases(victim: ActorId) -> dict[str, list[RayFault]]:
    """Return the moments at which one actor is hit. A shard is hit as the first stage gets its step."""
    at = victim if victim.kind == "stage" else ActorId("stage", 0)
    found = {name: [RayFault(at, "apply", nth, victim)] for name, nth in MOMENTS.items()}
    found["snapshot"] = [RayFault(at, "snapshot", 1, victim)]
    fifth = MOMENTS["fifth decode"]
    stage = at if victim.kind == "stage" else ActorId("stage", 1)  # a shard is hit while a stage repeats its steps
    found["replay"] = [RayFault(stage, "apply", fifth, stage), RayFault(stage, "apply", fifth + 2, victim)]
    found["hung at first decode"] = [RayFault(at, "apply", PREFILL + 1, victim, signal.SIGSTOP)]
    twice = {name: [*faults, _later(faults[-1])] for name, faults in found.items()}
    return {**found, **{f"{name}, and again": faults for name, faults in twice.items()}}


def _later(fault: RayFault) -> RayFault:
    """The same actor dies once more, some calls after the fault: at a step, or in what is repeated of it."""
    nth = 3 if fault.method != "apply" else fault.nth + 2
    return RayFault(fault.at, "apply", nth, fault.victim)
