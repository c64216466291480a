"""An ExpertShard: the experts that one process holds, answering requests; it keeps no state of any sequence."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from k3ray.workers.experts import ExpertStore
from k3ray.workers.frames import ExpertReply, decode_expert_request, encode_expert_reply


class ExpertShard:
    """Answers expert requests; the same request always gets the same bits, so asking again is safe."""

    def __init__(self, store: ExpertStore) -> None:
        self._store = store
        self._at_work: dict[int, float] = {}  # thread -> when the request that it computes arrived
        self._noting = threading.Lock()

    def apply(self, message: pa.Buffer) -> pa.Buffer:
        """Return the outputs of the request's pairs; MissingExpert when one of them is not held here."""
        with self._working():
            request = decode_expert_request(message)
            outputs = self._store.compute(request.layer, request.latents, request.token_rows(), request.experts)
            damaged = self._store.damaged_among(request.layer, request.experts)
            return encode_expert_reply(ExpertReply(request.layer, outputs, damaged))

    def busy_s(self) -> float:
        """Return for how long the oldest request that is being computed has been so; 0.0 when there is none.

        For a thread beside those that compute: it tells a shard that hangs from one that has nothing to do.
        """
        with self._noting:
            return time.monotonic() - min(self._at_work.values()) if self._at_work else 0.0

    @contextmanager
    def _working(self) -> Iterator[None]:
        thread = threading.get_ident()
        with self._noting:
            self._at_work[thread] = time.monotonic()
        try:
            yield
        finally:
            with self._noting:
                del self._at_work[thread]
