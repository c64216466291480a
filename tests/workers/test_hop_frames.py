"""Frames arrive whole and alike, however they are cut on the way; what is no frame is refused before it is read."""

from __future__ import annotations

import random
import socket
import threading

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3ray.workers import hop_frames
from k3ray.workers.frames import ExpertReply, decode_expert_reply, encode_expert_reply
from k3ray.workers.hop_frames import (
    FAILURE,
    HEADER,
    MAX_FRAME_BYTES,
    REPLY,
    REQUEST,
    FrameTooLarge,
    HopBroken,
    HopFrame,
    receive_frame,
    send_frame,
)


def received(sent: bytes) -> HopFrame | None:
    """What a reader makes of bytes after which the connection ends."""
    near, far = socket.socketpair()
    with near, far:
        near.sendall(sent)
        near.shutdown(socket.SHUT_WR)
        return receive_frame(far)


@pytest.mark.parametrize("size", [0, 1, 31, 4096, 65_537, 9_000_001])
def test_every_size_arrives_whole_in_both_directions(size: int) -> None:
    near, far = socket.socketpair()
    text = random.Random(size).randbytes(size)
    with near, far:
        for one, other, kind in ((near, far, REQUEST), (far, near, REPLY)):
            sending = threading.Thread(target=send_frame, args=(one, HopFrame(kind, 7, 11, pa.py_buffer(text))))
            sending.start()
            found = receive_frame(other)
            sending.join(10)
            assert found is not None and (found.kind, found.number, found.work_ns) == (kind, 7, 11)
            assert found.message.to_pybytes() == text


def test_a_frame_cut_into_single_bytes_is_the_same_frame() -> None:
    near, far = socket.socketpair()
    with near, far:
        whole = HEADER.pack(REPLY, 3, 0, 5) + b"hello" + HEADER.pack(FAILURE, 4, 0, 0)

        def drip() -> None:
            for byte in whole:
                near.sendall(bytes([byte]))

        dripping = threading.Thread(target=drip)
        dripping.start()
        first, second = receive_frame(far), receive_frame(far)
        dripping.join(10)
        assert first is not None and first.message.to_pybytes() == b"hello"
        assert second is not None and (second.kind, second.message.size) == (FAILURE, 0)


def test_the_end_between_two_frames_is_no_error() -> None:
    assert received(b"") is None


@given(st.integers(1, HEADER.size + 9))
@settings(deadline=None)
def test_a_frame_that_ends_early_is_refused(length: int) -> None:
    with pytest.raises(HopBroken, match="before the end of a frame"):
        received((HEADER.pack(REPLY, 1, 0, 10) + b"0123456789")[:length])


@pytest.mark.parametrize("length", [MAX_FRAME_BYTES + 1, 1 << 62, (1 << 64) - 1])
def test_a_length_too_large_takes_no_memory(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def allocate(size: int) -> pa.Buffer:
        taken.append(size)
        raise HopBroken(f"{size} bytes")

    monkeypatch.setattr(hop_frames.pa, "allocate_buffer", allocate)
    with pytest.raises(HopBroken, match=f"{length} bytes"):
        received(HEADER.pack(REQUEST, 1, 0, length))
    assert taken == []


@given(st.binary(min_size=HEADER.size, max_size=100))
@settings(deadline=None)
def test_what_is_no_frame_is_refused(found: bytes) -> None:
    kind, _, _, length = HEADER.unpack(found[: HEADER.size])
    if kind in (REQUEST, REPLY, FAILURE) and length <= len(found) - HEADER.size:
        return
    with pytest.raises(HopBroken):
        received(found)


def test_what_nobody_takes_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hop_frames, "MAX_FRAME_BYTES", 100)
    near, far = socket.socketpair()
    with near, far:
        with pytest.raises(FrameTooLarge, match="101 bytes"):
            send_frame(near, HopFrame(REQUEST, 1, 0, pa.py_buffer(bytes(101))))
        far.setblocking(False)
        with pytest.raises(BlockingIOError):
            far.recv(1)


def test_arrays_of_a_received_message_lie_in_its_own_memory() -> None:
    outputs = np.random.default_rng(0).standard_normal((9, 17)).astype(np.float32)
    near, far = socket.socketpair()
    with near, far:
        send_frame(near, HopFrame(REPLY, 1, 0, encode_expert_reply(ExpertReply(2, outputs))))
        frame = receive_frame(far)
    assert frame is not None
    found = decode_expert_reply(frame.message).outputs
    assert found.tobytes() == outputs.tobytes()
    low = frame.message.address
    assert low <= found.__array_interface__["data"][0] < low + frame.message.size
    assert not found.flags.writeable
