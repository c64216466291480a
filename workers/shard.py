"""An ExpertShard: the experts that one process holds, answering requests; it keeps no state of any sequence."""

from __future__ import annotations

import pyarrow as pa

from k3ray.workers.experts import ExpertStore
from k3ray.workers.frames import ExpertReply, decode_expert_request, encode_expert_reply


class ExpertShard:
    """Answers expert requests; the same request always gets the same bits, so asking again is safe."""

    def __init__(self, store: ExpertStore) -> None:
        self._store = store

    def apply(self, message: pa.Buffer) -> pa.Buffer:
        """Return the outputs of the request's pairs; MissingExpert when one of them is not held here."""
        request = decode_expert_request(message)
        outputs = self._store.compute(request.layer, request.latents, request.token_rows(), request.experts)
        return encode_expert_reply(ExpertReply(request.layer, outputs))
