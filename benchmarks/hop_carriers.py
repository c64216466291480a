"""Ways to carry a request to another process and its answer back, all with the same interface, for benchmarks/hop.py.

Every answerer takes a message whose first eight bytes say how many bytes to answer, and computes nothing.
`python -m benchmarks.hop_carriers WAY HOST` is one answerer of a way that needs no Ray: it prints its address as JSON.
"""

from __future__ import annotations

import base64
import json
import multiprocessing.connection as standard
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.flight as flight

from k3ray.workers.hop_address import DoorAddress
from k3ray.workers.hop_door import HopDoor
from k3ray.workers.hop_link import HopLink

LENGTH = struct.Struct("!Q")
ANSWER = bytes(20_000_000)
KEY = b"a benchmark's key"
Address = dict[str, Any]


class Carrier(Protocol):
    """Connections to several answerers."""

    def exchange(self, messages: Sequence[bytes]) -> int:
        """Send message i to answerer i, all before the first answer is awaited; returns the bytes of the answers."""
        ...


def answer_of(message: Any) -> memoryview:
    """What an answerer answers."""
    return memoryview(ANSWER)[: LENGTH.unpack_from(message)[0]]


def read_whole(connection: socket.socket, size: int) -> bytearray:
    """Read exactly size bytes."""
    found, got = bytearray(size), 0
    while got < size:
        part = connection.recv_into(memoryview(found)[got:], size - got, socket.MSG_WAITALL)
        if not part:
            raise EOFError
        got += part
    return found


class Bare:
    """Sockets with a length before each message, and nothing else: no proof, no bound. The floor."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._ends = []
        for address in addresses:
            end = socket.socket(socket.AF_INET if address["host"] else socket.AF_UNIX)
            end.connect((address["host"], address["port"]) if address["host"] else "\0" + address["name"])
            if address["host"]:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._ends.append(end)

    def exchange(self, messages: Sequence[bytes]) -> int:
        """See Carrier."""
        for end, message in zip(self._ends, messages, strict=False):
            end.sendall(LENGTH.pack(len(message)) + message)
        return sum(
            len(read_whole(end, LENGTH.unpack(read_whole(end, 8))[0]))
            for end, _ in zip(self._ends, messages, strict=False)
        )


def serve_bare(host: str) -> tuple[Address, Callable[[], None]]:
    """One answerer of Bare."""
    name = f"k3ray-bare-{secrets.token_hex(4)}"
    listener = socket.socket(socket.AF_INET if host else socket.AF_UNIX)
    listener.bind((host, 0) if host else "\0" + name)
    listener.listen()

    def serve() -> None:
        connection, _ = listener.accept()
        if host:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            answer = answer_of(read_whole(connection, LENGTH.unpack(read_whole(connection, 8))[0]))
            connection.sendmsg([LENGTH.pack(len(answer))])
            connection.sendall(answer)

    return {"host": host, "name": name, "port": listener.getsockname()[1] if host else 0}, serve


class Standard:
    """multiprocessing.connection with its authkey, byte messages only."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._ends = [
            standard.Client((one["host"], one["port"]) if one["host"] else one["name"], authkey=KEY)
            for one in addresses
        ]

    def exchange(self, messages: Sequence[bytes]) -> int:
        """See Carrier."""
        for end, message in zip(self._ends, messages, strict=False):
            end.send_bytes(message)
        return sum(len(end.recv_bytes(1 << 30)) for end, _ in zip(self._ends, messages, strict=False))


def serve_standard(host: str) -> tuple[Address, Callable[[], None]]:
    """One answerer of Standard."""
    name = f"\0k3ray-standard-{secrets.token_hex(4)}"
    listener = standard.Listener((host, 0) if host else name, authkey=KEY)

    def serve() -> None:
        with listener.accept() as connection:
            while True:
                connection.send_bytes(answer_of(connection.recv_bytes(1 << 30)))

    return {"host": host, "name": name, "port": listener.address[1] if host else 0}, serve


class Flight:
    """Arrow Flight: one DoExchange kept open to each answerer; messages travel as application metadata."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._clients = [flight.connect(one["uri"]) for one in addresses]
        opened = [client.do_exchange(flight.FlightDescriptor.for_command(b"experts")) for client in self._clients]
        self._ends: list[tuple[Any, Any]] = opened

    def exchange(self, messages: Sequence[bytes]) -> int:
        """See Carrier."""
        for (writer, _), message in zip(self._ends, messages, strict=False):
            writer.write_metadata(message)
        return sum(reader.read_chunk().app_metadata.size for (_, reader), _ in zip(self._ends, messages, strict=False))


class FlightServer(flight.FlightServerBase):  # type: ignore[misc]
    """Answers on one exchange for ever."""

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Flight calls this for every exchange."""
        for chunk in reader:
            writer.write_metadata(pa.py_buffer(answer_of(chunk.app_metadata)))


def serve_flight(host: str) -> tuple[Address, Callable[[], None]]:
    """One answerer of Flight."""
    path = f"/tmp/k3ray-flight-{secrets.token_hex(4)}"
    server = FlightServer(f"grpc://{host}:0" if host else f"grpc+unix://{path}")
    return {"uri": f"grpc://{host}:{server.port}" if host else f"grpc+unix://{path}"}, server.serve


class Hop:
    """k3ray's own: HopLink and HopDoor."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._links = [self._link(one) for one in addresses]

    @staticmethod
    def _link(address: Address) -> HopLink:
        secret = base64.b64decode(address["secret"])
        found = DoorAddress(address["host"], address["name"], address["port"], secret)
        return HopLink(lambda given_up: found)

    def exchange(self, messages: Sequence[bytes]) -> int:
        """See Carrier."""
        sent = [
            (link, link.submit(pa.py_buffer(message)))
            for link, message in zip(self._links, messages, strict=False)
        ]  # fmt: skip
        return sum(link.collect(ticket).size for link, ticket in sent)


def serve_hop(host: str) -> tuple[Address, Callable[[], None]]:
    """One answerer of Hop."""
    door = HopDoor(lambda message: pa.py_buffer(answer_of(message)))
    found = door.at(host) if host else door.local()
    secret = base64.b64encode(found.secret).decode()
    address = {"host": found.host, "name": found.name, "port": found.port, "secret": secret}
    return address, threading.Event().wait  # type: ignore[return-value]


WAYS: dict[str, tuple[Callable[[Sequence[Address]], Carrier], Callable[[str], tuple[Address, Callable[[], None]]]]] = {
    "bare socket": (Bare, serve_bare),
    "hop": (Hop, serve_hop),
    "multiprocessing": (Standard, serve_standard),
    "flight": (Flight, serve_flight),
}


def main() -> None:
    """Answer until killed."""
    address, serve = WAYS[sys.argv[1]][1](sys.argv[2] if len(sys.argv) > 2 else "")
    print(json.dumps(address), flush=True)
    try:
        serve()
    except (EOFError, OSError):
        return


if __name__ == "__main__":
    main()
