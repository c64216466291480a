"""Where a door is: a name on its own host, an address and a port for others; how sockets there are set up."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass, field

from k3ray.workers.failure import Failure

BACKLOG = 128
SILENCE_S = 30  # after so long without a sign of life from its host a connection is over


class NoPort(Failure):
    """No port of those that may be used is free."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class DoorAddress:
    """How to reach a door. host: empty for the name of a Unix socket in the abstract name space, which is no file.

    number: the port. secret: what the door expects proof of.
    """

    host: str
    name: str
    port: int
    secret: bytes = field(repr=False)

    def __str__(self) -> str:
        return f"{self.host} port {self.port}" if self.host else f"the local socket {self.name}"


def listen_locally() -> tuple[socket.socket, str]:
    """Listen for processes of this host alone; returns the socket and its name."""
    name = f"k3ray-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{name}")
    listener.listen(BACKLOG)
    return listener, name


def listen_on(host: str, ports: tuple[int, int] | None) -> tuple[socket.socket, int]:
    """Listen at one address of this host, on the first free port of a range or of the system's; raises NoPort."""
    first, last = ports or (0, 0)
    refused = ""
    for port in range(first, last + 1):
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            refused = str(error)
            continue
        return listener, listener.getsockname()[1]
    where = f"ports {first} to {last} (K3RAY_PORTS)" if ports else "any port"
    raise NoPort(f"an expert shard cannot listen at {host} on {where}: {refused}; name a range with more free ports")


def connect(address: DoorAddress, timeout_s: float) -> socket.socket:
    """Connect to a door; OSError where nobody answers in time."""
    if address.host:
        return without_delay(socket.create_connection((address.host, address.port), timeout_s))
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        connection.connect(f"\0{address.name}")
    except BaseException:
        connection.close()
        raise
    return connection


def without_delay(connection: socket.socket) -> socket.socket:
    """Set up a connection: small frames go at once, and a host that is gone is noticed. Returns it."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S // 3)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_S // 6)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)
    return connection


def wake(connection: socket.socket) -> None:
    """End a connection or a listener that another thread waits on: that one wakes, finds it ended, and closes it."""
    with suppress(OSError):  # not connected any more
        connection.shutdown(socket.SHUT_RDWR)


def shut(connection: socket.socket) -> None:
    """End and close a connection or a listener of one's own thread."""
    wake(connection)
    connection.close()
