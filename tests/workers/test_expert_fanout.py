"""Pairs go to their owners and outputs come back to their places, whoever answers first; a short answer is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3ray.workers.expert_fanout import IncompleteReply, RemoteExperts
from k3ray.workers.frames import ExpertReply, ExpertRequest, decode_expert_request, encode_expert_reply

Floats = npt.NDArray[np.float32]
LAYER, LATENT = 3, 4


def output(expert: int, latent: Floats) -> Floats:
    """What expert `expert` makes of a latent here: no two pairs of these tests have the same."""
    return (latent + np.float32(1000 * expert)).astype(np.float32)


class StubShard:
    """A shard that computes `output` for what it is asked, and refuses experts of others."""

    def __init__(self, shard: int, num_shards: int) -> None:
        self.shard = shard
        self.num_shards = num_shards
        self.requests: list[ExpertRequest] = []

    def submit(self, request: pa.Buffer) -> Any:
        return request

    def collect(self, ticket: Any) -> pa.Buffer:
        request = decode_expert_request(ticket)
        self.requests.append(request)
        assert all(expert % self.num_shards == self.shard for expert in request.experts.tolist())
        pairs = zip(request.token_rows().tolist(), request.experts.tolist(), strict=True)
        outputs = np.stack([output(expert, request.latents[row]) for row, expert in pairs])
        return self.reply(request, outputs)

    def reply(self, request: ExpertRequest, outputs: Floats) -> pa.Buffer:
        return encode_expert_reply(ExpertReply(request.layer, outputs))


@given(
    choice=st.lists(st.permutations(range(9)).map(lambda ids: ids[:4]), min_size=1, max_size=6),
    num_shards=st.integers(1, 5),
)
def test_every_output_has_its_place(choice: list[list[int]], num_shards: int) -> None:
    ids = np.array(choice, np.int32)
    latents = np.arange(len(ids) * LATENT, dtype=np.float32).reshape(len(ids), LATENT)
    shards = [StubShard(number, num_shards) for number in range(num_shards)]
    found = RemoteExperts(shards).begin(LAYER, ids, latents)()
    expected = np.stack([[output(expert, latents[t]) for expert in row] for t, row in enumerate(ids.tolist())])
    assert np.array_equal(found, expected)
    asked = [request for shard in shards for request in shard.requests]
    assert sum(len(request.experts) for request in asked) == ids.size
    assert all(request.layer == LAYER for request in asked)


class ShortShard(StubShard):
    """Leaves the last output out."""

    def reply(self, request: ExpertRequest, outputs: Floats) -> pa.Buffer:
        return encode_expert_reply(ExpertReply(request.layer, outputs[:-1]))


class OtherLayerShard(StubShard):
    """Answers for another layer."""

    def reply(self, request: ExpertRequest, outputs: Floats) -> pa.Buffer:
        return encode_expert_reply(ExpertReply(request.layer + 1, outputs))


@pytest.mark.parametrize("bad", [ShortShard, OtherLayerShard])
def test_an_answer_that_does_not_cover_the_question_is_refused(bad: type[StubShard]) -> None:
    ids = np.array([[0, 3, 1], [2, 5, 4]], np.int32)
    pending = RemoteExperts([StubShard(0, 2), bad(1, 2)]).begin(LAYER, ids, np.zeros((2, LATENT), np.float32))
    with pytest.raises(IncompleteReply, match="asked for 3 outputs of layer 3"):
        pending()
