"""The door of an expert shard: stages that hold its secret connect and ask; one request is computed at a time.

It does not know what a request means, nor how its address gets to the stages.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pyarrow as pa

from k3ray.workers.hop_address import DoorAddress, listen_locally, listen_on, shut, wake, without_delay
from k3ray.workers.hop_failures import encode_failure
from k3ray.workers.hop_frames import FAILURE, REPLY, REQUEST, FrameTooLarge, HopFrame, receive_frame, send_frame
from k3ray.workers.hop_secret import challenge, new_secret

PROOF_S = 10.0  # in which a stranger must have proven that he holds the secret
MAX_STRANGERS = 64  # connections that have not: past it the oldest is closed


class HopDoor:
    """Listens, and answers each request with `answer`. Nothing listens before an address has been asked for."""

    def __init__(self, answer: Callable[[pa.Buffer], pa.Buffer], proof_s: float = PROOF_S) -> None:
        self._answer = answer
        self._proof_s = proof_s
        self._secret = new_secret()
        self._turn = threading.Lock()  # held while a request is computed
        self._lock = threading.Lock()  # of what follows
        self._addresses: dict[str, DoorAddress] = {}
        self._listeners: list[socket.socket] = []
        self._strangers: dict[socket.socket, None] = {}  # in order of arrival
        self._friends: set[socket.socket] = set()
        self._closed = False
        self.work_s = 0.0  # in which requests were computed

    @property
    def turn(self) -> threading.Lock:
        """Hold it to look at what requests change, between two of them."""
        return self._turn

    def local(self) -> DoorAddress:
        """Return the address for processes of this host."""
        with self._lock:
            if "" not in self._addresses:
                listener, name = listen_locally()
                self._addresses[""] = DoorAddress("", name, 0, self._secret)
                self._listen(listener)
            return self._addresses[""]

    def at(self, host: str, ports: tuple[int, int] | None = None) -> DoorAddress:
        """Return the address for processes of other hosts: one of this host's own.

        ports: the first free one from the first to the last; None: the system chooses. Raises NoPort.
        """
        with self._lock:
            if host not in self._addresses:
                listener, port = listen_on(host, ports)
                self._addresses[host] = DoorAddress(host, "", port, self._secret)
                self._listen(listener)
            return self._addresses[host]

    def close(self) -> None:
        """Stop listening and end every connection; a request that is being computed is computed for nobody."""
        with self._lock:
            self._closed = True
            ending = [*self._listeners, *self._strangers, *self._friends]
        for one in ending:
            wake(one)

    def _listen(self, listener: socket.socket) -> None:
        self._listeners.append(listener)
        threading.Thread(target=self._admit, args=(listener,), name="k3ray-hop-door", daemon=True).start()

    def _admit(self, listener: socket.socket) -> None:
        """Accept for ever; whoever hangs in his proof hangs alone."""
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                if self._closed:
                    listener.close()
                    return
                time.sleep(0.05)  # out of file descriptors, or a connection that was reset in the queue
                continue
            with self._lock:
                crowd = [*self._strangers][: max(0, len(self._strangers) + 1 - MAX_STRANGERS)]
                self._strangers[connection] = None
            for oldest in crowd:
                wake(oldest)
            try:
                threading.Thread(target=self._meet, args=(connection,), name="k3ray-hop", daemon=True).start()
            except RuntimeError:  # no thread to be had: the asker connects anew
                self._part(connection)

    def _meet(self, connection: socket.socket) -> None:
        """One connection's life: proof, requests and answers, end."""
        try:
            with suppress(OSError):  # no proof, a connection that broke, or no frame: it is closed, whatever it was
                challenge(without_delay(connection), self._secret, self._proof_s)
                with self._lock:
                    self._strangers.pop(connection, None)
                    self._friends.add(connection)
                    if self._closed:
                        return
                while (request := receive_frame(connection)) is not None and request.kind == REQUEST:
                    self._send(connection, self._answered(request))
        finally:
            self._part(connection)

    def _part(self, connection: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(connection, None)
            self._friends.discard(connection)
        shut(connection)

    def _answered(self, request: HopFrame) -> HopFrame:
        """Compute an answer; the time it took includes the wait for the requests of others."""
        started = time.perf_counter_ns()
        with self._turn:
            begun = time.perf_counter()
            try:
                kind, message = REPLY, self._answer(request.message)
            except Exception as error:  # noqa: BLE001 - whatever it is, the asker must hear of it
                kind, message = FAILURE, encode_failure(error)
            self.work_s += time.perf_counter() - begun
        return HopFrame(kind, request.number, time.perf_counter_ns() - started, message)

    def _send(self, connection: socket.socket, answer: HopFrame) -> None:
        try:
            send_frame(connection, answer)
        except FrameTooLarge as error:
            send_frame(connection, HopFrame(FAILURE, answer.number, answer.work_ns, encode_failure(error)))
