"""The thin Ray faces of a LayerStage and an ExpertShard: they load, delegate, and report; nothing is decided here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import ray
from ray._private import state as ray_state

from k3ray.kernels.compile import compile_all
from k3ray.workers.experts import ExpertStore
from k3ray.workers.failure import Failure
from k3ray.workers.fence import Fence
from k3ray.workers.held_snapshot import SnapshotChunk, SnapshotPlace
from k3ray.workers.hop_address import DoorAddress
from k3ray.workers.hop_door import HopDoor
from k3ray.workers.hop_link import HopCounts, HopLink
from k3ray.workers.io_counts import IoCounts
from k3ray.workers.loading import LoadedSlice, ShardSpec, StageSpec, load_shard, load_stage
from k3ray.workers.memory_binding import bind_process
from k3ray.workers.message_counts import FarEnds, MessageCounts
from k3ray.workers.model.snapshot import StatePiece
from k3ray.workers.own_memory import OwnMemory
from k3ray.workers.process_report import ProcessReport, versions
from k3ray.workers.shard import ExpertShard
from k3ray.workers.shard_door import ShardDoor
from k3ray.workers.shard_link import ReplaceableShard
from k3ray.workers.specs import part_name
from k3ray.workers.stage import LayerStage
from k3ray.workers.stage_sign import StageSign
from k3ray.workers.step_times import StepTimes

Part = TypeVar("Part")
ASIDE = "aside"  # the concurrency group of the calls that are answered while the actor is at work


class NotLoaded(Failure):
    """An actor that was asked to work before it was loaded."""


def _is_given_up() -> bool:
    """Whether Ray's head takes this actor for dead."""
    found = ray_state.actors(ray.get_runtime_context().get_actor_id())
    return bool(found.get("State") == "DEAD")


class LayerStageActor:
    """A LayerStage in its own process."""

    def __init__(self) -> None:
        self._stage: LayerStage | None = None
        self._parts: LoadedSlice | None = None
        self._links: list[ReplaceableShard] = []
        self._hops = HopCounts()
        self._spec: StageSpec | None = None
        self._memory = OwnMemory()
        self._fence = Fence(_is_given_up)

    def load(self, spec: StageSpec, shards: Sequence[Any], far: FarEnds) -> ProcessReport:
        """Compile the kernels or take them from the cache, and load the stage; shards are actor handles.

        far: which of the others are on other nodes.
        """
        if spec.node_id is not None:  # of a joined cluster: it may be on another host than the driver
            self._memory.watch()
            self._fence.begin()
        if self._parts is not None:
            self._parts.close()
        note = bind_process(spec.numa, spec.cores, spec.numa_bytes)
        compile_all()
        self._hops = HopCounts()
        self._links = [ReplaceableShard(self._link(handle)) for handle in shards]
        self._stage, self._parts = load_stage(spec, self._links)
        self._spec = spec
        self._stage.traffic.place(far.driver if self._stage.has_head else far.following, far.driver)
        for traffic, is_far in zip(self._parts.shard_traffic, far.shards, strict=True):
            traffic.place(is_far, is_far)
        return ProcessReport(os.getpid(), versions(), note)

    def ping(self) -> int:
        """Say that this process lives, while it works on something else: call it in the group ASIDE."""
        return os.getpid()

    def sign(self) -> StageSign:
        """See StageSign: call it in the group ASIDE."""
        links = [(shard, one.link) for shard, one in enumerate(self._links)]
        found = [link.unreached(shard) for shard, link in links if isinstance(link, HopLink)]
        idle_s = 0.0 if self._stage is None else self._stage.idle_s
        return StageSign(idle_s, tuple(one for one in found if one is not None))

    def peak_memory(self) -> int:
        """See OwnMemory.peak_bytes: call it in the group ASIDE."""
        return self._memory.peak_bytes()

    def following_is(self, generation: int, far: bool) -> None:
        """Count for a new process of the stage after this one, on this node or not: call it in the group ASIDE."""
        if self._stage is not None:
            self._stage.traffic.place(far, generation=generation)

    def relink(self, shard: int, generation: int, handle: Any, far: bool) -> None:
        """Ask another process from now on, also for what the lost one owes: call it in the group ASIDE.

        far: whether it is on another node.
        """
        for traffic in self._parts.shard_traffic[shard : shard + 1] if self._parts is not None else ():
            traffic.place(far, far, generation)
        if shard < len(self._links):
            unused = self._links[shard].replace(self._link(handle), generation)
            if isinstance(unused, HopLink):
                unused.close()

    def _link(self, handle: Any) -> HopLink:
        return HopLink(ShardDoor(handle, ASIDE), self._hops)

    def open_sequence(self, session: int, capacity: int) -> None:
        """See LayerStage.open_sequence. Shards are connected to now: one that is not reached later was cut off."""
        for link in [one.link for one in self._links]:
            if isinstance(link, HopLink):
                link.reach()
        _loaded(self._stage).open_sequence(session, capacity)

    def close_sequence(self, session: int) -> None:
        """See LayerStage.close_sequence."""
        _loaded(self._stage).close_sequence(session)

    def pieces(self, session: int) -> list[StatePiece]:
        """See Slice.pieces."""
        return _loaded(self._stage).pieces(session)

    def snapshot_piece(self, session: int, piece: StatePiece) -> pa.Buffer:
        """See Slice.snapshot_piece."""
        return _loaded(self._stage).snapshot_piece(session, piece)

    def restore_piece(self, session: int, message: pa.Buffer, capacity: int) -> None:
        """See Slice.restore_piece."""
        _loaded(self._stage).restore_piece(session, message, capacity)

    def finish_restore(self, session: int) -> None:
        """See Slice.finish_restore."""
        _loaded(self._stage).finish_restore(session)

    def snapshot(self, session: int) -> SnapshotPlace:
        """See LayerStage.snapshot."""
        return _loaded(self._stage).snapshot(session)

    def snapshot_chunk(self, session: int, offset: int) -> SnapshotChunk:
        """See LayerStage.snapshot_chunk: call it in the group ASIDE."""
        return _loaded(self._stage).snapshot_chunk(session, offset)

    def apply(self, message: pa.Buffer) -> pa.Buffer:
        """See LayerStage.apply."""
        return _loaded(self._stage).apply(message)

    def record_routing(self) -> None:
        """See LayerStage.record_routing."""
        _loaded(self._stage).record_routing()

    def recorded_routing(self) -> list[tuple[int, int, npt.NDArray[np.int32]]]:
        """See LayerStage.recorded_routing."""
        return _loaded(self._stage).recorded_routing()

    def damaged_met(self) -> list[tuple[int, int]]:
        """See ExpertStore.damaged_met."""
        return _loaded(self._parts).damaged_met()

    def counts(self) -> IoCounts:
        """See LoadedSlice.counts; with the times of the steps."""
        times = _loaded(self._stage).times + StepTimes.of_hops(self._hops)
        return replace(_loaded(self._parts).counts(), times=times, messages=self._messages())

    def _messages(self) -> MessageCounts:
        spec, stage, shards = _loaded(self._spec), _loaded(self._stage), _loaded(self._parts).shard_traffic
        return MessageCounts.of_stage(part_name(spec), spec.first == 0, stage.has_head, stage.traffic, shards)


class ExpertShardActor:
    """An ExpertShard in its own process."""

    def __init__(self) -> None:
        self._shard: ExpertShard | None = None
        self._store: ExpertStore | None = None
        self._door: HopDoor | None = None
        self._ports: tuple[int, int] | None = None
        self._memory = OwnMemory()
        self._fence = Fence(_is_given_up)

    def load(self, spec: ShardSpec, ports: tuple[int, int] | None = None) -> ProcessReport:
        """Compile the kernels or take them from the cache, and open the shard's cache.

        ports: the first and the last at which it may listen for stages of other nodes; None: any.
        """
        self._ports = ports
        if spec.node_id is not None:  # of a joined cluster: it may be on another host than the driver
            self._memory.watch()
            self._fence.begin()
        if self._store is not None:
            self._store.close()
        if self._door is not None:
            self._door.close()
            self._door = None
        note = bind_process(spec.numa, spec.cores, spec.numa_bytes)
        compile_all()
        self._shard, self._store = load_shard(spec)
        self._door = HopDoor(self._shard.apply)
        return ProcessReport(os.getpid(), versions(), note)

    def ping(self) -> int:
        """See LayerStageActor.ping."""
        return os.getpid()

    def busy_s(self) -> float:
        """See ExpertShard.busy_s: call it in the group ASIDE."""
        return self._shard.busy_s() if self._shard is not None else 0.0

    def peak_memory(self) -> int:
        """See LayerStageActor.peak_memory."""
        return self._memory.peak_bytes()

    def door(self, asker_node: str) -> DoorAddress | None:
        """Return where a stage on that Ray node reaches this shard, and its secret; None: it has not loaded yet.

        Call it in the group ASIDE.
        """
        door = self._door
        if door is None:
            return None
        if asker_node == ray.get_runtime_context().get_node_id():
            return door.local()
        return door.at(ray.util.get_node_ip_address(), self._ports)

    def damaged_met(self) -> list[tuple[int, int]]:
        """See ExpertStore.damaged_met."""
        with _loaded(self._door).turn:
            return _loaded(self._store).damaged_met()

    def counts(self) -> IoCounts:
        """See IoCounts."""
        door = _loaded(self._door)
        with door.turn:
            counts = IoCounts.of(_loaded(self._store), None)
            return replace(counts, times=StepTimes(shard_s=door.work_s))


def _loaded(part: Part | None) -> Part:
    if part is None:
        raise NotLoaded("the actor was asked to work before load() finished: a failure while loading was not noticed")
    return part
