"""The actors of one plan: started, loaded, called in a chain, and ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import ray

from k3ray.cluster.plan import Plan
from k3ray.workers.actors import ExpertShardActor, LayerStageActor, ProcessReport
from k3ray.workers.failure import Failure
from k3ray.workers.io_counts import IoCounts
from k3ray.workers.model.snapshot import StatePiece

Options = Callable[[float, int | None, str], dict[str, Any]]
NUM_CPUS = 0  # the plan shares the cores out; Ray must not make an actor wait for one


class ActorLost(Failure):
    """An actor's process ended and nothing replaces it."""

    exit_code = 3


class ActorChain:
    """The running actors of a plan. Object refs go from stage to stage; the driver holds only the answers."""

    def __init__(self, plan: Plan, options: Options) -> None:
        """Start the processes; options(num_cpus, memory_bytes, name) gives Ray's options for one actor."""
        self._plan = plan
        self._all_shards = [
            ray.remote(ExpertShardActor).options(**options(NUM_CPUS, None, f"shard-{spec.shard}")).remote()
            for spec in plan.shards
        ]
        self._all_stages = [
            ray.remote(LayerStageActor).options(**options(NUM_CPUS, None, f"stage-{number}")).remote()
            for number in range(len(plan.stages))
        ]
        self._stages, self._shards = self._all_stages, self._all_shards
        self._loaded_plan = plan
        self.reports: dict[str, ProcessReport] = {}

    @property
    def num_stages(self) -> int:
        """How many stages a frame passes."""
        return len(self._stages)

    def load(self, plan: Plan | None = None, loaded: Callable[[str], None] = lambda name: None) -> None:
        """Load every actor's part, all at once; `loaded` hears of each. Raises the first actor's failure.

        Another plan may be loaded into the same processes when it has no more stages and shards than they are.
        """
        plan = self._loaded_plan = plan or self._plan
        self._stages, self._shards = self._all_stages[: len(plan.stages)], self._all_shards[: len(plan.shards)]
        pending = {}
        for handle, shard in zip(self._shards, plan.shards, strict=True):
            pending[handle.load.remote(shard)] = f"shard {shard.shard} of {shard.num_shards}"
        for handle, stage in zip(self._stages, plan.stages, strict=True):
            ref = handle.load.remote(stage, self._shards)
            pending[ref] = f"layers {stage.first}..{stage.stop - 1}"
        waiting = list(pending)
        while waiting:
            done, waiting = ray.wait(waiting)
            for ref in done:
                self.reports[pending[ref]] = _answer(ref)
                loaded(pending[ref])

    def open_sequence(self, session: int, capacity: int) -> None:
        """Begin an empty sequence in every stage."""
        self._on_every_stage([stage.open_sequence.remote(session, capacity) for stage in self._stages])

    def close_sequence(self, session: int) -> None:
        """Forget a sequence in every stage."""
        self._on_every_stage([stage.close_sequence.remote(session) for stage in self._stages])

    def snapshot(self, session: int) -> Iterator[tuple[StatePiece, pa.Buffer]]:
        """Yield a sequence's state piece by piece, layer by layer; no step may be sent meanwhile."""
        for stage in self._stages:
            for piece in _answer(stage.pieces.remote(session)):
                yield piece, _answer(stage.snapshot_piece.remote(session, piece))

    def restore(self, session: int, pieces: Iterable[tuple[int, pa.Buffer]], capacity: int) -> None:
        """Open a sequence from its (layer, piece)s: each goes to the stage that holds the layer now."""
        for layer, message in pieces:
            for stage, spec in zip(self._stages, self._loaded_plan.stages, strict=True):
                if spec.first <= layer < spec.stop:
                    _answer(stage.restore_piece.remote(session, message, capacity))
        self._on_every_stage([stage.finish_restore.remote(session) for stage in self._stages])

    def submit(self, message: pa.Buffer) -> Any:
        """Send a frame down the chain without waiting."""
        ref: Any = message
        for stage in self._stages:
            ref = stage.apply.remote(ref)
        return ref

    def collect(self, ticket: Any) -> pa.Buffer:
        """Wait for the last stage's answer, or raise what failed on the way."""
        return _answer(ticket)

    def damaged_met(self) -> list[tuple[int, int]]:
        """Return (layer, expert) of every damaged expert that any actor has used so far."""
        asked = [actor.damaged_met.remote() for actor in [*self._stages, *self._shards]]
        return sorted({met for ref in asked for met in _answer(ref)})

    def record_routing(self) -> None:
        """Have every stage keep from now on which experts its tokens choose."""
        self._on_every_stage([stage.record_routing.remote() for stage in self._stages])

    def recorded_routing(self) -> list[tuple[int, int, npt.NDArray[np.int32]]]:
        """Return (step, layer, ids (tokens, k)) of all stages, step by step and layer by layer."""
        kept = [entry for stage in self._stages for entry in _answer(stage.recorded_routing.remote())]
        return sorted(kept, key=lambda entry: entry[:2])

    def counts(self) -> IoCounts:
        """Return what all actors have read since they were loaded."""
        return sum((_answer(actor.counts.remote()) for actor in [*self._stages, *self._shards]), IoCounts())

    def stop(self) -> None:
        """End every actor."""
        for actor in [*self._all_stages, *self._all_shards]:
            ray.kill(actor)

    def _on_every_stage(self, refs: Sequence[Any]) -> None:
        for ref in refs:
            _answer(ref)


def _answer(ref: Any) -> Any:
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayActorError as error:
        raise ActorLost(f"an actor of this run ended unexpectedly: {error}; start the run again") from None
