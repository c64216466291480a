"""Frames on a hop: a header of fixed size, then one Arrow message or one failure, read into memory of its own.

A length is checked before memory is taken for it.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

import pyarrow as pa

from k3ray.workers.failure import Failure

HEADER = struct.Struct("!B7xQQQ")  # kind, number, nanoseconds of work, bytes that follow
MAX_FRAME_BYTES = 1 << 30  # 64 tokens' outputs of 16 experts are 58 MB in the released model
REQUEST, REPLY, FAILURE = 1, 2, 3


class HopBroken(ConnectionError):
    """The connection ended, or what came over it is no frame; it cannot be used any more."""


class FrameTooLarge(Failure):
    """A message larger than anyone takes; nothing of it was sent."""


@dataclass(frozen=True, slots=True)
class HopFrame:
    """One frame. number: of the request, the same in its answer. work_ns: what the answer took to compute."""

    kind: int
    number: int
    work_ns: int
    message: pa.Buffer


def send_frame(connection: socket.socket, frame: HopFrame) -> None:
    """Send a frame whole, not put together in memory first. Raises FrameTooLarge, OSError when nobody takes it."""
    if frame.message.size > MAX_FRAME_BYTES:
        raise FrameTooLarge(
            f"a message of {frame.message.size:,} bytes, expected at most {MAX_FRAME_BYTES:,}: take fewer sequences "
            "at a time"
        )
    header = HEADER.pack(frame.kind, frame.number, frame.work_ns, frame.message.size)
    sent = connection.sendmsg([header, frame.message])
    if sent < len(header):
        connection.sendall(header[sent:])
        sent = len(header)
    if sent < len(header) + frame.message.size:
        connection.sendall(memoryview(frame.message)[sent - len(header) :])


def receive_frame(connection: socket.socket) -> HopFrame | None:
    """Wait for a whole frame; None when the other end closed between two frames. Raises HopBroken, OSError."""
    header = bytearray(HEADER.size)
    got = connection.recv_into(header, HEADER.size, socket.MSG_WAITALL)
    if got == 0:
        return None
    _fill(connection, memoryview(header), got)
    kind, number, work_ns, length = HEADER.unpack(header)
    if kind not in (REQUEST, REPLY, FAILURE):
        raise HopBroken(f"found a frame of kind {kind}, expected {REQUEST} to {FAILURE}: mixed versions?")
    if length > MAX_FRAME_BYTES:
        raise HopBroken(f"found a frame of {length} bytes, expected at most {MAX_FRAME_BYTES}")
    message = pa.allocate_buffer(length)
    _fill(connection, memoryview(message), 0)
    return HopFrame(kind, number, work_ns, message)


def _fill(connection: socket.socket, memory: memoryview, got: int) -> None:
    while got < len(memory):
        part = connection.recv_into(memory[got:], len(memory) - got, socket.MSG_WAITALL)
        if part == 0:
            raise HopBroken(f"the connection ended {len(memory) - got} bytes before the end of a frame")
        got += part
