"""Only who holds the secret gets in, nobody is told it, and what one end has proven cannot be used at the other."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3ray.workers import hop_secret
from k3ray.workers.hop_secret import GREETING, NONCE_BYTES, PROOF_BYTES, NotProven, answer, challenge

SECRET = b"s" * 32


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    door, asker = socket.socketpair()
    with door, asker:
        yield door, asker


def beside(work: Callable[[], object]) -> tuple[threading.Thread, list[BaseException | None]]:
    """Run in another thread; the list gets what was raised, or None."""
    found: list[BaseException | None] = []

    def run() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - looked at by the test
            found.append(error)
        else:
            found.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def test_both_ends_with_the_secret_go_on(ends: tuple[socket.socket, socket.socket]) -> None:
    door, asker = ends
    thread, found = beside(lambda: challenge(door, SECRET, 5))
    answer(asker, SECRET, 5)
    thread.join(5)
    assert found == [None]
    assert door.gettimeout() is None and asker.gettimeout() is None
    asker.sendall(b"next")
    assert door.recv(10) == b"next"  # nothing of the proof is left on the way


@pytest.mark.parametrize("wrong", [b"x" * 32, SECRET[:-1] + b"t", b""])
def test_an_asker_with_another_secret_is_refused_and_gets_no_proof(
    ends: tuple[socket.socket, socket.socket], wrong: bytes
) -> None:
    door, asker = ends
    thread, found = beside(lambda: answer(asker, wrong, 5))
    with pytest.raises(NotProven, match="does not hold"):
        challenge(door, SECRET, 5)
    door.shutdown(socket.SHUT_RDWR)
    thread.join(5)
    assert isinstance(found[0], NotProven)


def test_a_door_with_another_secret_is_refused(ends: tuple[socket.socket, socket.socket]) -> None:
    door, asker = ends
    theirs = b"n" * NONCE_BYTES

    def impostor() -> None:
        door.sendall(GREETING + theirs)
        said = door.recv(1000)
        nonce = said[len(GREETING) : len(GREETING) + NONCE_BYTES]
        door.sendall(hop_secret._proof(b"guess" * 8, b"door", theirs, nonce))

    thread, _ = beside(impostor)
    with pytest.raises(NotProven, match="does not hold"):
        answer(asker, SECRET, 5)
    thread.join(5)


def test_a_proof_sent_back_to_its_maker_is_worth_nothing(ends: tuple[socket.socket, socket.socket]) -> None:
    """An impostor at a door's old port sends the asker's own nonce and proof back."""
    door, asker = ends

    def mirror() -> None:
        door.sendall(GREETING + b"n" * NONCE_BYTES)
        door.sendall(door.recv(1000)[-PROOF_BYTES:])

    thread, _ = beside(mirror)
    with pytest.raises(NotProven, match="does not hold"):
        answer(asker, SECRET, 5)
    thread.join(5)


def test_an_answer_heard_before_does_not_open_the_door_again() -> None:
    heard = b""
    for turn in range(2):
        door, asker = socket.socketpair()
        with door, asker:
            thread, found = beside(lambda door=door: challenge(door, SECRET, 5))  # type: ignore[misc]
            if turn == 0:
                nonce = asker.recv(1000)[len(GREETING) :]
                own = b"o" * NONCE_BYTES
                heard = GREETING + own + hop_secret._proof(SECRET, b"asker", nonce, own)
            asker.sendall(heard)
            thread.join(5)
            assert (found[0] is None) == (turn == 0)


@given(st.binary(max_size=200))
@settings(max_examples=60, deadline=None)
def test_no_bytes_open_the_door(said: bytes) -> None:
    door, asker = socket.socketpair()
    with door, asker:
        asker.sendall(said)
        asker.shutdown(socket.SHUT_WR)
        with pytest.raises(NotProven):
            challenge(door, SECRET, 5)


def test_a_stranger_who_drips_is_given_up_at_the_deadline(ends: tuple[socket.socket, socket.socket]) -> None:
    door, asker = ends
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.02):
            asker.sendall(b"k")

    thread, _ = beside(drip)
    started = time.monotonic()
    with pytest.raises(NotProven, match="in time"):
        challenge(door, SECRET, 0.2)
    assert time.monotonic() - started < 2
    stop.set()
    thread.join(5)
