"""Doors and links for tests: what a door answers, how it is asked, and that no thread of it stays behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager

import pyarrow as pa

from k3ray.workers.hop_address import DoorAddress
from k3ray.workers.hop_door import HopDoor
from k3ray.workers.hop_link import HopCounts, HopLink

Answer = Callable[[pa.Buffer], pa.Buffer]
LOCAL, TCP, TCP6 = "", "127.0.0.1", "::1"


def echo(message: pa.Buffer) -> pa.Buffer:
    return pa.py_buffer(b"answer to " + message.to_pybytes())


@contextmanager
def opened_doors() -> Iterator[Callable[..., HopDoor]]:
    """A maker of doors that are closed at the end, and with them every thread of theirs."""
    made: list[HopDoor] = []

    def make(answering: Answer = echo, proof_s: float = 5.0) -> HopDoor:
        made.append(HopDoor(answering, proof_s))
        return made[-1]

    yield make
    for door in made:
        door.close()
    deadline = time.monotonic() + 5
    while any(thread.name.startswith("k3ray-hop") for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("k3ray-hop")]


def link_to(address: DoorAddress, counts: HopCounts | None = None, patience_s: float = 5.0) -> HopLink:
    return HopLink(lambda given_up: address, counts, patience_s)


def address_of(door: HopDoor, host: str) -> DoorAddress:
    return door.at(host) if host else door.local()


def ask(link: HopLink, text: bytes) -> bytes:
    return link.collect(link.submit(pa.py_buffer(text))).to_pybytes()


def within(seconds: float, work: Callable[[], bytes]) -> bytes:
    """What the work returns; a failed assertion where it waits for ever."""
    found: Future[bytes] = Future()

    def run() -> None:
        try:
            found.set_result(work())
        except Exception as error:  # noqa: BLE001 - raised again below
            found.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    assert wait([found], seconds).done, "it waits for ever"
    return found.result()
