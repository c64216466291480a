"""A shard as a stage sees it over a hop: one connection, made when it is needed and made again when it breaks.

It does not decide that a shard is lost: whoever tells it the address says so, by ShardGone.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import pyarrow as pa

from k3ray.workers.failure import Failure
from k3ray.workers.hop_address import SILENCE_S, DoorAddress, connect, shut, wake
from k3ray.workers.hop_failures import decode_failure
from k3ray.workers.hop_frames import FAILURE, REPLY, REQUEST, HopBroken, HopFrame, receive_frame, send_frame
from k3ray.workers.hop_secret import answer
from k3ray.workers.shard_link import ShardGone
from k3ray.workers.stage_sign import UnreachedShard

CONNECT_S = 5.0  # for one attempt
PATIENCE_S = 60.0  # for all attempts to reach a shard that lives, and that was never reached
MAX_BREAKS = 5  # connections that may break under one request
LONGEST_PAUSE_S = 1.0
SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)  # TCP has waited SILENCE_S for a sign of life


class ShardUnreachable(Failure):
    """A shard's process lives, and no connection to it holds."""

    exit_code = 3


@dataclass(slots=True)
class HopCounts:
    """Sums over all links of one stage.

    wait_s: the stage stood still for an answer; hop_s: the part of it in which the shard was not at work on it.
    send_s: sending, which nothing overlaps.
    """

    trips: int = 0
    send_s: float = 0.0
    wait_s: float = 0.0
    hop_s: float = 0.0


@dataclass(slots=True, eq=False)
class HopTicket:
    """A request on its way. sent_on: the connection that carries it. breaks: connections that broke under it."""

    number: int
    request: pa.Buffer
    started: float
    sent_on: socket.socket | None = None
    reply: HopFrame | None = None
    breaks: int = 0


class HopLink:
    """A ShardLink over a socket. One thread asks; `close` may come from any.

    A shard keeps no state, so a request may be sent again over a new connection. At most one is on its way: two ends
    that both send what the other one does not read yet would wait for ever.
    """

    def __init__(
        self,
        find: Callable[[Callable[[], bool]], DoorAddress],
        counts: HopCounts | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """find: asks the shard for its address, until given_up() is true.

        It raises ShardGone when the process is gone or the link is given up, ConnectionError to be asked again.
        """
        self._find = find
        self._counts = counts or HopCounts()
        self._patience_s = patience_s
        self._connection: socket.socket | None = None
        self._address: DoorAddress | None = None  # where it was reached last
        self._silent_since: float | None = None  # monotonic: an answer is wanted, and the shard cannot be reached
        self._was_reached = False
        self._refused = ""  # what the last attempt to reach it has met, since then
        self._pending: HopTicket | None = None
        self._numbers = 0
        self._closed = threading.Event()
        self._using = threading.Lock()

    def reach(self) -> None:
        """Connect where it is not connected, in one attempt; what it meets is said when an answer is wanted."""
        with self._using:
            self._reach()
            self._close_if_asked()

    def submit(self, request: pa.Buffer) -> HopTicket:
        """Send a request; waits only for the answer to the one before, where nobody has collected that yet.

        What cannot be sent now is sent by collect, which says why it cannot. Raises FrameTooLarge.
        """
        started = time.perf_counter()
        self._numbers += 1
        ticket = HopTicket(self._numbers, request, started)
        with self._using:
            self._reach()
            if self._connection is not None:
                self._try(self._send, ticket)
            self._close_if_asked()
        self._counts.send_s += time.perf_counter() - started
        return ticket

    def collect(self, ticket: HopTicket) -> pa.Buffer:
        """Wait for the answer. Raises the shard's Failure, ShardGone, ShardUnreachable."""
        started = time.perf_counter()
        with self._using:
            try:
                while ticket.reply is None:
                    if self._connection is None:
                        self._connect(ticket)
                    self._try(self._send if ticket.sent_on is not self._connection else self._receive, ticket)
            finally:
                self._close_if_asked()
        self._count(ticket, ticket.reply, time.perf_counter() - started)
        if ticket.reply.kind == FAILURE:
            raise decode_failure(ticket.reply.message)
        return ticket.reply.message

    def unreached(self, shard: int) -> UnreachedShard | None:
        """Return the shard, which has this number, while an answer is awaited and no attempt to reach it has succeeded;
        None: it is reached, or not tried again yet. Any thread may ask.
        """
        since, refused = self._silent_since, self._refused
        if since is None or not refused:
            return None
        return UnreachedShard(shard, time.monotonic() - since, refused, self._was_reached)

    def close(self) -> None:
        """End the connection for good; who waits for an answer gets ShardGone."""
        self._closed.set()
        connection = self._connection
        if connection is not None:
            wake(connection)
        if self._using.acquire(blocking=False):  # else whoever uses it closes it when he is woken
            self._close_if_asked()
            self._using.release()

    def _close_if_asked(self) -> None:
        if self._closed.is_set():
            self._drop()

    def _drop(self) -> None:
        connection, self._connection, self._pending = self._connection, None, None
        if connection is not None:
            shut(connection)

    def _try(self, action: Callable[[HopTicket], None], ticket: HopTicket) -> None:
        try:
            action(ticket)
        except OSError as error:
            ticket.breaks += 1
            self._drop()
            waited_s = min(time.perf_counter() - ticket.started, SILENCE_S if error.errno in SILENT else 0.0)
            self._silent_since, self._refused = time.monotonic() - waited_s, ""
        except BaseException:  # no memory for the answer, an interrupt: what is left of it on the way is no frame
            self._drop()
            raise

    def _send(self, ticket: HopTicket) -> None:
        connection = self._connection
        assert connection is not None
        if self._pending is not None:
            self._receive(self._pending)
        send_frame(connection, HopFrame(REQUEST, ticket.number, 0, ticket.request))
        ticket.sent_on, self._pending = connection, ticket

    def _receive(self, ticket: HopTicket) -> None:
        connection = self._connection
        assert connection is not None
        reply = receive_frame(connection)
        if reply is None:
            raise HopBroken("the shard closed the connection")
        if reply.number != ticket.number or reply.kind not in (REPLY, FAILURE):
            raise HopBroken(f"found an answer of kind {reply.kind} to request {reply.number}, asked {ticket.number}")
        ticket.reply, self._pending = reply, None

    def _connect(self, ticket: HopTicket) -> None:
        """Connect, trying as long as the shard's process lives; where it was never reached, as long as patience lasts.

        One that was reached before is cut off: the driver, which hears of it (unreached), replaces it or ends the run.
        """
        deadline, pause_s = time.monotonic() + self._patience_s, 0.02
        if self._silent_since is None:
            self._silent_since, self._refused = time.monotonic(), ""
        while (refused := self._attempt()) is not None:
            self._refused = refused
            if not self._was_reached and time.monotonic() > deadline:
                raise ShardUnreachable(
                    f"an expert shard's process lives, but {refused} for {self._patience_s:.0f} s: does a firewall "
                    "between the hosts close that port? See docs/cluster.md, ports"
                )
            self._closed.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        if ticket.breaks > MAX_BREAKS:
            raise ShardUnreachable(
                f"an expert shard's process lives, but {ticket.breaks} connections to it broke under one request of "
                f"{ticket.request.size:,} bytes: look for what cuts connections between the hosts"
            )

    def _reach(self) -> None:
        if self._connection is None:
            with suppress(ShardGone):
                self._attempt()

    def _attempt(self) -> str | None:
        """Connect once; returns what was refused. Raises ShardGone."""
        if self._closed.is_set():
            raise ShardGone("the shard was replaced")
        address, connection = None, None
        try:
            address = self._find(self._closed.is_set)
            connection = connect(address, CONNECT_S)
            answer(connection, address.secret, CONNECT_S)
        except OSError as error:
            if connection is not None:
                shut(connection)
            return f"{address or self._address or 'its door'} has not let us in ({error})"
        self._connection, self._address = connection, address
        self._silent_since, self._was_reached = None, True
        if self._closed.is_set():  # close() may have looked just before
            raise ShardGone("the shard was replaced")
        return None

    def _count(self, ticket: HopTicket, reply: HopFrame, waited_s: float) -> None:
        counts, whole_s = self._counts, time.perf_counter() - ticket.started
        counts.trips += 1
        counts.wait_s += waited_s
        counts.hop_s += min(waited_s, max(0.0, whole_s - reply.work_ns / 1e9))
