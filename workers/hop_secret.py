"""Who may speak over a hop: both ends prove, before anything else is read, that they hold the same secret.

The secret travels by Ray's own calls and never over the hop. What follows the proof is neither encrypted nor signed: it
is as safe from somebody who can change packets on the network as Ray's own traffic is.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time

SECRET_BYTES = 32
NONCE_BYTES = 32
PROOF_BYTES = 32  # of SHA-256
GREETING = b"k3ray-hop-1\n"


class NotProven(ConnectionError):
    """The other end does not hold the secret, or did not prove it in time; nothing it sent was used."""


def new_secret() -> bytes:
    """Return a secret for one process's door."""
    return secrets.token_bytes(SECRET_BYTES)


def challenge(connection: socket.socket, secret: bytes, timeout_s: float) -> None:
    """The listening end: ask for proof, and give one only to who has given his. Raises NotProven, OSError."""
    deadline, nonce = time.monotonic() + timeout_s, secrets.token_bytes(NONCE_BYTES)
    connection.settimeout(timeout_s)
    connection.sendall(GREETING + nonce)
    answer = _receive(connection, len(GREETING) + NONCE_BYTES + PROOF_BYTES, deadline)
    theirs, proof = answer[len(GREETING) : -PROOF_BYTES], answer[-PROOF_BYTES:]
    _check(answer[: len(GREETING)], proof, _proof(secret, b"asker", nonce, theirs))
    connection.sendall(_proof(secret, b"door", nonce, theirs))
    connection.settimeout(None)


def answer(connection: socket.socket, secret: bytes, timeout_s: float) -> None:
    """The connecting end: give proof and ask for one. Raises NotProven, OSError."""
    deadline, nonce = time.monotonic() + timeout_s, secrets.token_bytes(NONCE_BYTES)
    connection.settimeout(timeout_s)
    asked = _receive(connection, len(GREETING) + NONCE_BYTES, deadline)
    theirs = asked[len(GREETING) :]
    connection.sendall(GREETING + nonce + _proof(secret, b"asker", theirs, nonce))
    _check(asked[: len(GREETING)], _receive(connection, PROOF_BYTES, deadline), _proof(secret, b"door", theirs, nonce))
    connection.settimeout(None)


def _proof(secret: bytes, role: bytes, of_door: bytes, of_asker: bytes) -> bytes:
    """HMAC-SHA-256 of the role and both nonces: no proof can be sent back to its maker, or sent again."""
    return hmac.digest(secret, GREETING + role + b"\n" + of_door + of_asker, "sha256")


def _check(greeting: bytes, proof: bytes, expected: bytes) -> None:
    if not (hmac.compare_digest(proof, expected) and greeting == GREETING):
        raise NotProven("the other end of the hop does not hold this run's secret")


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Return exactly size bytes, which must all be here before the deadline, however slowly they drip in."""
    found = bytearray()
    while len(found) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise NotProven("the other end of the hop did not prove itself in time")
        connection.settimeout(left)
        try:
            part = connection.recv(size - len(found))
        except TimeoutError:
            continue
        if not part:
            raise NotProven("the other end of the hop closed the connection before it had proven itself")
        found += part
    return bytes(found)
