"""Messages come back as they went, read in place, and a message of another kind is refused."""

from __future__ import annotations

import pickle

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3ray.workers import frames
from k3ray.workers.frames import ActivationFrame, ExpertReply, ExpertRequest, FrameError, LogitsFrame


@given(
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    num_blocks=st.integers(0, 3),
    hidden=st.sampled_from([0, 1, 5, 32]),
    seed=st.integers(0, 2**32 - 1),
)
def test_activations_round_trip(counts: list[int], num_blocks: int, hidden: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    tokens = sum(counts)
    frame = ActivationFrame(
        step=seed,
        sessions=np.repeat(np.arange(len(counts)), counts),
        positions=np.concatenate([np.arange(7, 7 + count) for count in counts]),
        ids=generator.integers(0, 2**31 - 1, tokens, dtype=np.int32),
        wants_logits=generator.integers(0, 2, tokens).astype(np.bool_),
        prefix=generator.standard_normal((tokens, hidden), np.float32),
        blocks=generator.standard_normal((tokens, num_blocks, hidden), np.float32),
    )
    message = pickle.loads(pickle.dumps(frames.encode_activations(frame), protocol=5))
    back = frames.decode_activations(message)
    for name in ("sessions", "positions", "ids", "wants_logits", "prefix", "blocks"):
        found, sent = getattr(back, name), getattr(frame, name)
        assert found.dtype == sent.dtype and found.shape == sent.shape and found.tobytes() == sent.tobytes(), name
        assert not found.flags.writeable or not found.size
    assert back.step == frame.step
    assert [(high - low) for _, low, high in back.segments()] == counts


def test_logits_and_experts_round_trip() -> None:
    generator = np.random.default_rng(1)
    logits = LogitsFrame(4, np.array([1, 2]), np.array([9, 0]), generator.standard_normal((2, 11), np.float32))
    back = frames.decode_logits(frames.encode_logits(logits))
    assert back.logits.tobytes() == logits.logits.tobytes() and back.positions.tolist() == [9, 0]
    offsets = np.array([0, 2, 3, 6], np.int32)
    experts = np.array([4, 1, 9, 3, 2, 8], np.int32)
    request = ExpertRequest(7, generator.standard_normal((3, 6), np.float32), offsets, experts)
    asked = frames.decode_expert_request(frames.encode_expert_request(request))
    assert asked.token_rows().tolist() == [0, 0, 1, 2, 2, 2] and asked.experts.tolist() == experts.tolist()
    assert asked.latents.tobytes() == request.latents.tobytes()
    reply = ExpertReply(7, generator.standard_normal((6, 6), np.float32))
    answered = frames.decode_expert_reply(frames.encode_expert_reply(reply))
    assert answered.layer == 7 and answered.outputs.tobytes() == reply.outputs.tobytes()


def test_no_rows_round_trip() -> None:
    empty = LogitsFrame(4, np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 11), np.float32))
    assert frames.decode_logits(frames.encode_logits(empty)).logits.shape == (0, 11)


def test_other_messages_are_refused() -> None:
    reply = frames.encode_expert_reply(ExpertReply(7, np.zeros((1, 6), np.float32)))
    with pytest.raises(FrameError, match="kind logits"):
        frames.decode_logits(reply)
    with pytest.raises(FrameError, match="found 4 bytes"):
        frames.decode_logits(pa.py_buffer(b"abcd"))


@pytest.mark.parametrize(
    ("sessions", "positions", "reason"),
    [([1, 2, 1], [0, 0, 1], "do not stand together"), ([1, 1], [4, 4], "not consecutive"), ([1, 1], [4, 3], "not")],
)
def test_rows_out_of_order_are_refused(sessions: list[int], positions: list[int], reason: str) -> None:
    count = len(sessions)
    frame = ActivationFrame(
        step=1,
        sessions=np.array(sessions),
        positions=np.array(positions),
        ids=np.zeros(count, np.int32),
        wants_logits=np.zeros(count, np.bool_),
        prefix=np.zeros((count, 0), np.float32),
        blocks=np.zeros((count, 0, 0), np.float32),
    )
    with pytest.raises(FrameError, match=reason):
        frame.segments()
