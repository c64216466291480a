"""Actors as threads of this process, with the order, the deaths and the hanging of real ones, and faults on command."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

from k3ray.cluster.actor_calls import ActorGone, ActorId
from k3ray.cluster.plan import Plan, with_spec
from k3ray.workers.frames import decode_activations
from k3ray.workers.io_counts import IoCounts
from k3ray.workers.loading import load_shard, load_stage
from k3ray.workers.shard_link import ReplaceableShard, ShardGone
from k3ray.workers.specs import ShardSpec, StageSpec
from k3ray.workers.stage_sign import StageSign, UnreachedShard

POLL_S = 0.005
Ticket = Future[Any]
How = Literal["dies before", "dies after", "hangs", "is stuck"]


@dataclass(frozen=True, slots=True)
class Fault:
    """The nth call (from 1, over all processes of the place) of a method ends its process, stops it, or never ends."""

    actor: ActorId
    method: str
    nth: int
    how: How = "dies before"


@dataclass(eq=False)
class Process:
    """One actor's process: calls one after the other, until it is killed."""

    actors: FakeActors
    actor: ActorId
    calls: queue.Queue[Any] = field(default_factory=queue.Queue)
    pending: set[Ticket] = field(default_factory=set)
    parts: dict[str, Any] = field(default_factory=dict)
    unreached: dict[int, float] = field(default_factory=dict)  # shards that are asked in vain, and since when
    reached: set[int] = field(default_factory=set)
    dead: bool = False
    stopped: bool = False

    def __post_init__(self) -> None:
        threading.Thread(target=self._run, name=str(self.actor), daemon=True).start()

    def call(self, method: str, arguments: tuple[Any, ...]) -> Ticket:
        ticket: Ticket = Future()
        self.pending.add(ticket)
        self.calls.put((method, arguments, ticket))
        if self.dead:
            self.kill()
        return ticket

    def kill(self) -> None:
        self.dead = True
        for ticket in list(self.pending):
            with suppress(InvalidStateError):
                ticket.set_exception(ActorGone(f"{self.actor} was killed"))

    def answer_aside(self, method: str, arguments: tuple[Any, ...], ticket: Ticket) -> None:
        fault = self.actors.next_fault(self.actor, method)
        if fault == "dies before":
            self.kill()
            ticket.set_exception(ActorGone(f"{self.actor} was killed"))
            return
        try:
            part = self.parts.get("part")
            answer = 0.0 if method == "busy_s" and part is None else getattr(part, method)(*arguments)
            ticket.set_result(answer)
        except Exception as error:  # noqa: BLE001 - travels to the caller
            ticket.set_exception(error)

    def sign(self) -> StageSign:
        now, part = time.monotonic(), self.parts.get("part")
        unreached = tuple(
            UnreachedShard(shard, now - since, "cut", shard in self.reached)
            for shard, since in dict(self.unreached).items()
        )
        return StageSign(0.0 if part is None else part.idle_s, unreached)

    def receive(self, argument: Any) -> Any:
        """What a call is given: a frame of the stage before does not come over a link that is cut."""
        if not isinstance(argument, Future):
            return argument
        found, before = argument.result(), ActorId("stage", self.actor.number - 1)
        while self.actors.large_frames and not self.dead and self.actors.is_cut(before, self.actor):
            time.sleep(POLL_S)
        if self.dead:
            raise ActorGone(f"{self.actor} was killed")
        return found

    def _run(self) -> None:
        while not self.dead:
            method, arguments, ticket = self.calls.get()
            fault = self.actors.next_fault(self.actor, method)
            if fault == "dies before":
                self.kill()
            if fault in ("hangs", "is stuck"):
                self.stopped = fault == "hangs"
                if fault == "is stuck" and method == "apply" and self.actor.kind == "shard":
                    self.parts["stuck"] = self.parts["part"]._working()
                    self.parts["stuck"].__enter__()
                return
            if self.dead:
                return
            try:
                answer = self._work(method, [self.receive(one) for one in arguments])
            except Exception as error:  # noqa: BLE001 - travels to the caller
                self._settle(ticket, error)
                continue
            if fault == "dies after":
                self.kill()
            self._settle(ticket, answer)

    def _settle(self, ticket: Ticket, answer: Any) -> None:
        with suppress(InvalidStateError):  # killed meanwhile
            ticket.set_exception(answer) if isinstance(answer, Exception) else ticket.set_result(answer)

    def _work(self, method: str, arguments: list[Any]) -> Any:
        actors, number = self.actors, self.actor.number
        if method == "load" and self.actor.kind == "shard":
            self.parts["part"], self.parts["store"] = load_shard(actors.plan.shards[number])
            return "loaded"
        if method == "load":
            self.parts["links"] = [ReplaceableShard(Link(self, actors.processes[one])) for one in actors.shards()]
            self.parts["part"], self.parts["store"] = load_stage(actors.plan.stages[number], self.parts["links"])
            return "loaded"
        if method == "relink":
            return self.relink(*arguments)
        if method == "apply" and self.actor.kind == "stage":
            actors.applied.append((number, decode_activations(arguments[0]).step))
        if method == "counts":
            return IoCounts()
        target = self.parts["store" if method == "damaged_met" else "part"]
        return getattr(target, method)(*arguments)

    def relink(self, shard: int, generation: int, process: Process) -> None:
        if "links" in self.parts:
            self.parts["links"][shard].replace(Link(self, process), generation)


@dataclass(frozen=True, slots=True)
class Link:
    """A shard as a stage sees it."""

    asker: Process
    process: Process

    def submit(self, request: pa.Buffer) -> Ticket:
        return self.process.call("apply", (request,))

    def collect(self, ticket: Ticket) -> pa.Buffer:
        shard = self.process.actor
        while self.asker.actors.is_cut(self.asker.actor, shard) and not self.process.dead:
            self.asker.unreached.setdefault(shard.number, time.monotonic())
            time.sleep(POLL_S)
        self.asker.unreached.pop(shard.number, None)
        self.asker.reached.add(shard.number)
        try:
            return ticket.result()
        except ActorGone as error:
            raise ShardGone(str(error)) from None


class FakeActors:
    """Actors (cluster/actor_calls.py) of a plan. applied: (stage, step) of every step that was computed, or begun."""

    def __init__(self, plan: Plan, faults: list[Fault]) -> None:
        self.plan = plan
        self.faults = faults
        self.calls: Counter[tuple[ActorId, str]] = Counter()
        self.applied: list[tuple[int, int]] = []
        self.generations: Counter[ActorId] = Counter()
        self.processes: dict[ActorId, Process] = {}
        self.is_cut: Callable[[ActorId, ActorId], bool] = lambda one, other: False
        self.large_frames = False  # they go from stage to stage, and small ones through whoever calls
        stages = [ActorId("stage", number) for number in range(len(plan.stages))]
        for actor in [*self.shards(), *stages]:
            self.processes[actor] = Process(self, actor)
            self.processes[actor].call("load", ()).result()

    @property
    def num_stages(self) -> int:
        return len(self.plan.stages)

    @property
    def num_shards(self) -> int:
        return len(self.plan.shards)

    def shards(self) -> list[ActorId]:
        return [ActorId("shard", number) for number in range(self.num_shards)]

    def layers_of(self, stage: int) -> range:
        return range(self.plan.stages[stage].first, self.plan.stages[stage].stop)

    def spec_of(self, actor: ActorId) -> StageSpec | ShardSpec:
        return (self.plan.shards if actor.kind == "shard" else self.plan.stages)[actor.number]

    def next_fault(self, actor: ActorId, method: str) -> How | None:
        self.calls[actor, method] += 1
        found = [
            one.how
            for one in self.faults
            if (one.actor, one.method, one.nth) == (actor, method, self.calls[actor, method])
        ]
        return found[0] if found else None

    def call(self, actor: ActorId, method: str, *arguments: Any) -> Ticket:
        return self.processes[actor].call(method, arguments)

    def call_aside(self, actor: ActorId, method: str, *arguments: Any) -> Ticket:
        process, ticket = self.processes[actor], Ticket()
        if process.dead:
            ticket.set_exception(ActorGone(f"{actor} is dead"))
        elif method == "relink":
            process.relink(*arguments)
        elif process.stopped:
            process.pending.add(ticket)
        elif method == "ping":
            ticket.set_result(1)
        elif method == "sign":
            ticket.set_result(process.sign())
        else:
            process.answer_aside(method, arguments, ticket)
        return ticket

    def is_done(self, ticket: Ticket, timeout_s: float) -> bool:
        try:
            ticket.exception(timeout_s)
        except FutureTimeout:
            return False
        return True

    def result(self, ticket: Ticket) -> Any:
        return ticket.result()

    def kill(self, actor: ActorId) -> None:
        self.processes[actor].kill()

    def start(self, actor: ActorId, spec: StageSpec | ShardSpec | None = None) -> Ticket:
        self.kill(actor)
        if spec is not None:
            self.plan = with_spec(self.plan, actor.number, spec)
        self.generations[actor] += 1
        process = self.processes[actor] = Process(self, actor)
        return process.call("load", ())

    def relink(self, shard: int) -> None:
        actor = ActorId("shard", shard)
        for number in range(self.num_stages):
            arguments = "relink", shard, self.generations[actor], self.processes[actor]
            self.call_aside(ActorId("stage", number), *arguments)
            self.call(ActorId("stage", number), *arguments)
