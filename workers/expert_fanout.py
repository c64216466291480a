"""Routed experts that live in other processes: pairs go to their owners, outputs come back to their places.

The order in which owners answer cannot matter: every output has one place, and the sum is the stage's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from k3ray.workers.expert_owners import ExpertOwners
from k3ray.workers.failure import Failure
from k3ray.workers.frames import ExpertRequest, decode_expert_reply, encode_expert_request
from k3ray.workers.message_counts import Traffic

Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]


class IncompleteReply(Failure):
    """A shard's answer that does not cover what it was asked; the step fails and no partial sum leaves it."""


class ShardLink(Protocol):
    """One ExpertShard as its askers see it."""

    def submit(self, request: pa.Buffer) -> Any:
        """Send a request without waiting; returns a ticket."""
        ...

    def collect(self, ticket: Any) -> pa.Buffer:
        """Wait for the reply to a ticket."""
        ...


class RemoteExperts:
    """Routed experts computed by ExpertShards."""

    def __init__(self, links: Sequence[ShardLink], owners: ExpertOwners | None = None) -> None:
        """owners: which link has which expert; in turn unless given."""
        self._links = links
        self._owners = owners or ExpertOwners(len(links))
        self._damaged: set[tuple[int, int]] = set()
        self.traffic = [Traffic() for _ in links]

    def begin(self, layer: int, expert_ids: Int32Array, latents: Float32Array) -> Callable[[], Float32Array]:
        """Send every shard its pairs; returns the call that collects the outputs (tokens, k, latent) f32."""
        owners = self._owners.of(layer, expert_ids)
        pending = []
        for shard, link in enumerate(self._links):
            mine = owners == shard
            rows = np.flatnonzero(mine.any(axis=1))
            if not len(rows):
                continue
            offsets = np.concatenate([[0], np.cumsum(mine[rows].sum(axis=1))]).astype(np.int32)
            request = ExpertRequest(layer, latents[rows], offsets, expert_ids[mine])
            message = encode_expert_request(request)
            self.traffic[shard].send(message.size)
            pending.append((shard, link.submit(message), mine))

        def collect() -> Float32Array:
            outputs = np.empty((*expert_ids.shape, latents.shape[1]), np.float32)
            for shard, ticket, mine in pending:
                message = self._links[shard].collect(ticket)
                self.traffic[shard].receive(message.size)
                self._place(layer, message, mine, outputs)
            return outputs

        return collect

    def damaged_among(self, layer: int, experts: Int32Array) -> tuple[int, ...]:
        """Return which of experts that were used are damaged, sorted, as the shards have said."""
        if not self._damaged:
            return ()
        return tuple(sorted(expert for expert in set(experts.reshape(-1).tolist()) if (layer, expert) in self._damaged))

    def _place(self, layer: int, message: pa.Buffer, mine: npt.NDArray[np.bool_], outputs: Float32Array) -> None:
        reply = decode_expert_reply(message)
        if reply.layer != layer or len(reply.outputs) != int(mine.sum()):
            raise IncompleteReply(
                f"a shard was asked for {int(mine.sum())} outputs of layer {layer} and answered "
                f"{len(reply.outputs)} of layer {reply.layer}"
            )
        outputs[mine] = reply.outputs
        self._damaged.update((layer, expert) for expert in reply.damaged)
