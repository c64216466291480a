"""The actors of one plan: started, loaded, called in a chain, and ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import ray

from k3ray.cluster.actor_calls import ActorId, all_actors
from k3ray.cluster.loading_watch import loaded_in_turn
from k3ray.cluster.plan import Plan, far_ends, with_spec
from k3ray.cluster.ray_answers import answer_of
from k3ray.cluster.ray_memory import await_started
from k3ray.workers.actors import ASIDE, ExpertShardActor, LayerStageActor
from k3ray.workers.io_counts import IoCounts
from k3ray.workers.message_counts import FarEnds
from k3ray.workers.model.snapshot import StatePiece
from k3ray.workers.process_report import ProcessReport
from k3ray.workers.specs import ShardSpec, StageSpec, part_name

Options = Callable[[float, int | None, str, str | None], dict[str, Any]]
NUM_CPUS = 0  # the plan shares the cores out; Ray must not make an actor wait for one


class ActorChain:
    """The running actors of a plan. Object refs go from stage to stage; the driver holds only the answers."""

    def __init__(
        self,
        plan: Plan,
        options: Options,
        node_names: Mapping[str, str] | None = None,
        ports: tuple[int, int] | None = None,
    ) -> None:
        """Start the processes; options(num_cpus, memory_bytes, name, node_id) gives Ray's options of one actor.

        node_names: by Ray's id of the node, for messages. ports: the first and the last at which shards may listen for
        stages of other nodes; None: any.
        """
        self._ports = ports
        self._node_names = dict(node_names or {})
        self._plan = plan
        self._loaded_plan = plan
        self._options = options
        self._generations: Counter[ActorId] = Counter()  # how often each place's process was replaced
        self._all_shards = [self._new(ActorId("shard", number)) for number in range(len(plan.shards))]
        self._all_stages = [self._new(ActorId("stage", number)) for number in range(len(plan.stages))]
        self.reports: dict[str, ProcessReport] = {}

    @property
    def num_stages(self) -> int:
        """How many stages a frame passes."""
        return len(self._loaded_plan.stages)

    @property
    def num_shards(self) -> int:
        """How many shards hold the experts; 0: the stages hold them."""
        return len(self._loaded_plan.shards)

    @property
    def _stages(self) -> list[Any]:
        return self._all_stages[: self.num_stages]

    @property
    def _shards(self) -> list[Any]:
        return self._all_shards[: self.num_shards]

    def layers_of(self, stage: int) -> range:
        """Return the zero-based layers of a stage."""
        return range(self._loaded_plan.stages[stage].first, self._loaded_plan.stages[stage].stop)

    def spec_of(self, actor: ActorId) -> StageSpec | ShardSpec:
        """Return what an actor is told, with the node that it runs on."""
        return (self._loaded_plan.shards if actor.kind == "shard" else self._loaded_plan.stages)[actor.number]

    def part_of(self, actor: ActorId) -> str:
        """Return what an actor holds, in words."""
        return part_name(self.spec_of(actor))

    def load(self, plan: Plan | None = None, loaded: Callable[[str], None] = lambda name: None) -> None:
        """Load every actor's part, all at once; `loaded` hears of each. Raises the first actor's failure.

        Another plan may be loaded into the same processes when it has no more stages and shards than they are.
        """
        self._loaded_plan = plan or self._plan
        actors = all_actors(self)
        self._await_started(actors)
        for actor, report in loaded_in_turn(self, {actor: self._load(actor) for actor in actors}):
            self.reports[self.part_of(actor)] = report
            loaded(self.part_of(actor))

    def loaded_reports(self) -> list[tuple[ActorId, ProcessReport]]:
        """Return what each actor's load has answered."""
        return [(actor, self.reports[self.part_of(actor)]) for actor in all_actors(self)]

    def open_sequence(self, session: int, capacity: int) -> None:
        """Begin an empty sequence in every stage."""
        self._on_every_stage([stage.open_sequence.remote(session, capacity) for stage in self._stages])

    def close_sequence(self, session: int) -> None:
        """Forget a sequence in every stage."""
        self._on_every_stage([stage.close_sequence.remote(session) for stage in self._stages])

    def snapshot(self, session: int) -> Iterator[tuple[StatePiece, pa.Buffer]]:
        """Yield a sequence's state piece by piece, layer by layer; no step may be sent meanwhile."""
        for stage in self._stages:
            for piece in answer_of(stage.pieces.remote(session)):
                yield piece, answer_of(stage.snapshot_piece.remote(session, piece))

    def restore(self, session: int, pieces: Iterable[tuple[int, pa.Buffer]], capacity: int) -> None:
        """Open a sequence from its (layer, piece)s: each goes to the stage that holds the layer now."""
        for layer, message in pieces:
            for stage, spec in zip(self._stages, self._loaded_plan.stages, strict=True):
                if spec.first <= layer < spec.stop:
                    answer_of(stage.restore_piece.remote(session, message, capacity))
        self._on_every_stage([stage.finish_restore.remote(session) for stage in self._stages])

    def submit(self, message: pa.Buffer) -> Any:
        """Send a frame down the chain without waiting."""
        ref: Any = message
        for stage in self._stages:
            ref = stage.apply.remote(ref)
        return ref

    def collect(self, ticket: Any) -> pa.Buffer:
        """Wait for the last stage's answer, or raise what failed on the way."""
        return answer_of(ticket)

    def damaged_met(self) -> list[tuple[int, int]]:
        """Return (layer, expert) of every damaged expert that any actor has used so far."""
        asked = [actor.damaged_met.remote() for actor in [*self._stages, *self._shards]]
        return sorted({met for ref in asked for met in answer_of(ref)})

    def record_routing(self) -> None:
        """Have every stage keep from now on which experts its tokens choose."""
        self._on_every_stage([stage.record_routing.remote() for stage in self._stages])

    def recorded_routing(self) -> list[tuple[int, int, npt.NDArray[np.int32]]]:
        """Return (step, layer, ids (tokens, k)) of all stages, step by step and layer by layer."""
        kept = [entry for stage in self._stages for entry in answer_of(stage.recorded_routing.remote())]
        return sorted(kept, key=lambda entry: entry[:2])

    def counts(self) -> IoCounts:
        """Return what all actors have read since they were loaded."""
        return sum((answer_of(actor.counts.remote()) for actor in [*self._stages, *self._shards]), IoCounts())

    def stop(self) -> None:
        """End every actor."""
        for actor in [*self._all_stages, *self._all_shards]:
            ray.kill(actor)

    def call(self, actor: ActorId, method: str, *arguments: Any) -> Any:
        """Send a call without waiting; calls to one actor are answered in order. Returns an object ref."""
        return getattr(self._handle(actor), method).remote(*arguments)

    def call_aside(self, actor: ActorId, method: str, *arguments: Any) -> Any:
        """Send a call that is answered at once, whatever the actor is working on."""
        return getattr(self._handle(actor), method).options(concurrency_group=ASIDE).remote(*arguments)

    def is_done(self, ticket: Any, timeout_s: float) -> bool:
        """Wait at most timeout_s for the answer, or the failure, of a call."""
        return bool(ray.wait([ticket], timeout=timeout_s)[0])

    def result(self, ticket: Any) -> Any:
        """Wait for the answer of a call; raises what the actor raised, ActorGone when it died before."""
        return answer_of(ticket)

    def kill(self, actor: ActorId) -> None:
        """End an actor's process; Ray needs five seconds for one that was stopped (SIGSTOP)."""
        ray.kill(self._handle(actor))

    def start(self, actor: ActorId, spec: StageSpec | ShardSpec | None = None) -> Any:
        """Put a new process in an actor's place and begin to load it; returns the load's ref.

        spec: its part from now on, where it is to be loaded otherwise, as on another node; the layers and the experts
        stay the same.
        """
        self.kill(actor)
        if spec is not None:
            self._loaded_plan = with_spec(self._loaded_plan, actor.number, spec)
        self._generations[actor] += 1
        handles = self._all_shards if actor.kind == "shard" else self._all_stages
        handles[actor.number] = self._new(actor)
        loading = self._load(actor)
        if actor.kind == "stage" and actor.number:
            before = actor.number - 1
            self._tell(before, "following_is", self._generations[actor], self._far(before).following)
        return loading

    def relink(self, shard: int) -> None:
        """Have every stage ask a shard's new process, which has loaded: calls of others do not wait for its load."""
        actor = ActorId("shard", shard)
        link = shard, self._generations[actor], self._handle(actor)
        for stage in range(self.num_stages):
            self._tell(stage, "relink", *link, self._far(stage).shards[shard])

    def _tell(self, stage: int, method: str, *arguments: Any) -> None:
        """Tell a stage aside, as it may wait for who was lost, and in order, as it may be loading with what was."""
        self.call_aside(ActorId("stage", stage), method, *arguments)
        self.call(ActorId("stage", stage), method, *arguments)

    def _far(self, stage: int) -> FarEnds:
        return far_ends(self._loaded_plan, stage, ray.get_runtime_context().get_node_id())

    def _new(self, actor: ActorId) -> Any:
        kind = ExpertShardActor if actor.kind == "shard" else LayerStageActor
        times = self._generations[actor]
        name = f"{actor.kind}-{actor.number}" + (f"-again-{times}" if times else "")  # names are unique while one dies
        spec = self.spec_of(actor)
        options = self._options(NUM_CPUS, spec.memory_bytes, name, spec.node_id)
        return ray.remote(concurrency_groups={ASIDE: 1})(kind).options(**options).remote()

    def _await_started(self, actors: Sequence[ActorId]) -> None:
        """Where Ray has been told what actors take, it may keep them waiting: see ray_memory.py."""
        specs = {actor: self.spec_of(actor) for actor in actors}
        await_started(
            {
                self._handle(actor).ping.remote(): (self.part_of(actor), spec.node_id, spec.memory_bytes)
                for actor, spec in specs.items()
                if spec.memory_bytes is not None
            },
            lambda node: self._node_names.get(node, node),
        )

    def _handle(self, actor: ActorId) -> Any:
        return (self._all_shards if actor.kind == "shard" else self._all_stages)[actor.number]

    def _load(self, actor: ActorId) -> Any:
        if actor.kind == "shard":
            return self._handle(actor).load.remote(self.spec_of(actor), self._ports)
        return self._handle(actor).load.remote(self.spec_of(actor), self._shards, self._far(actor.number))

    def _on_every_stage(self, refs: Sequence[Any]) -> None:
        for ref in refs:
            answer_of(ref)
