"""Stages and shards in one process behind the same messages: for proofs and tests that need no Ray."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from k3ray.workers.expert_fanout import ShardLink
from k3ray.workers.experts import ExpertStore
from k3ray.workers.io_counts import IoCounts
from k3ray.workers.loading import LoadedSlice, ShardSpec, StageSpec, load_shard, load_stage
from k3ray.workers.message_counts import MessageCounts
from k3ray.workers.model.snapshot import StatePiece
from k3ray.workers.shard import ExpertShard
from k3ray.workers.stage import LayerStage


class InProcessShard:
    """A shard as its askers see it, answering when it is asked to."""

    def __init__(self, shard: ExpertShard) -> None:
        self._shard = shard

    def submit(self, request: pa.Buffer) -> pa.Buffer:
        """Keep the request; nothing is computed yet."""
        return request

    def collect(self, ticket: pa.Buffer) -> pa.Buffer:
        """Compute the reply."""
        return self._shard.apply(ticket)


class InProcessChain:
    """The stages of one model, one after the other in the caller's thread."""

    def __init__(
        self, stages: Sequence[LayerStage], loaded: Sequence[LoadedSlice], stores: Sequence[ExpertStore]
    ) -> None:
        self._stages = stages
        self._loaded = loaded
        self._stores = stores
        self._parts: list[LoadedSlice | ExpertStore] = [*loaded, *stores]

    @property
    def num_stages(self) -> int:
        """How many stages a frame passes."""
        return len(self._stages)

    def open_sequence(self, session: int, capacity: int) -> None:
        """Begin an empty sequence in every stage."""
        for stage in self._stages:
            stage.open_sequence(session, capacity)

    def close_sequence(self, session: int) -> None:
        """Forget a sequence in every stage."""
        for stage in self._stages:
            stage.close_sequence(session)

    def snapshot(self, session: int) -> Iterator[tuple[StatePiece, pa.Buffer]]:
        """Yield a sequence's state piece by piece, layer by layer; no step may be sent meanwhile."""
        for stage in self._stages:
            for piece in stage.pieces(session):
                yield piece, stage.snapshot_piece(session, piece)

    def restore(self, session: int, pieces: Iterable[tuple[int, pa.Buffer]], capacity: int) -> None:
        """Open a sequence from its (layer, piece)s: each goes to the stage that holds the layer now."""
        for layer, message in pieces:
            for stage in self._stages:
                if layer in stage.covered:
                    stage.restore_piece(session, message, capacity)
        for stage in self._stages:
            stage.finish_restore(session)

    def submit(self, message: pa.Buffer) -> Future[pa.Buffer]:
        """Run the frame through the stages at once; the result, or the failure, is kept for collect."""
        answer: Future[pa.Buffer] = Future()
        try:
            for stage in self._stages:
                message = stage.apply(message)
            answer.set_result(message)
        except Exception as error:  # noqa: BLE001 - kept for collect, which raises it
            answer.set_exception(error)
        return answer

    def collect(self, ticket: Future[pa.Buffer]) -> pa.Buffer:
        """Return the last stage's answer, or raise what failed."""
        return ticket.result()

    def damaged_met(self) -> list[tuple[int, int]]:
        """Return (layer, expert) of every damaged expert used so far."""
        return sorted({met for part in self._parts for met in part.damaged_met()})

    def record_routing(self) -> None:
        """Have every stage keep from now on which experts its tokens choose."""
        for stage in self._stages:
            stage.record_routing()

    def recorded_routing(self) -> list[tuple[int, int, npt.NDArray[np.int32]]]:
        """Return (step, layer, ids (tokens, k)) of all stages, step by step and layer by layer."""
        kept = [entry for stage in self._stages for entry in stage.recorded_routing()]
        return sorted(kept, key=lambda entry: entry[:2])

    def counts(self) -> IoCounts:
        """Return what all stages and shards have read, where the stages' time went, and what was sent."""
        counts = [loaded.counts() for loaded in self._loaded] + [IoCounts.of(store, None) for store in self._stores]
        stages = zip(self._stages, self._loaded, strict=True)
        return sum([*counts, *(IoCounts(times=one.times, messages=_messages(one, parts)) for one, parts in stages)],
                   IoCounts())  # fmt: skip

    def close(self) -> None:
        """End the reading threads."""
        for part in self._parts:
            part.close()


def _messages(stage: LayerStage, parts: LoadedSlice) -> MessageCounts:
    covered = stage.covered
    name = f"layers {covered.start}..{covered.stop - 1}"
    return MessageCounts.of_stage(name, covered.start == 0, stage.has_head, stage.traffic, parts.shard_traffic)


def start_in_process(stages: Sequence[StageSpec], shards: Sequence[ShardSpec]) -> InProcessChain:
    """Load every stage and shard into this process."""
    loaded_shards = [load_shard(spec) for spec in shards]
    links: list[ShardLink] = [InProcessShard(shard) for shard, _ in loaded_shards]
    loaded_stages = [load_stage(spec, links) for spec in stages]
    return InProcessChain(
        [stage for stage, _ in loaded_stages],
        [loaded for _, loaded in loaded_stages],
        [store for _, store in loaded_shards],
    )
