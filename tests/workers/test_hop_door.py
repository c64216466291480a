"""A door: whoever hangs, cuts, floods or dies, the others are answered, each with his own answer."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pyarrow as pa
import pytest

from k3ray.workers import hop_door
from k3ray.workers.hop_address import NoPort, connect
from k3ray.workers.hop_door import HopDoor
from k3ray.workers.hop_frames import HEADER, REQUEST, HopFrame, send_frame
from k3ray.workers.hop_link import HopCounts, ShardUnreachable
from k3ray.workers.hop_secret import answer
from tests.hop_ends import LOCAL, TCP, TCP6, address_of, ask, echo, link_to, opened_doors, within


@pytest.fixture
def doors() -> Iterator[Callable[..., HopDoor]]:
    with opened_doors() as make:
        yield make


@pytest.mark.parametrize("host", [LOCAL, TCP, TCP6])
def test_requests_are_answered_in_turn(doors: Callable[..., HopDoor], host: str) -> None:
    counts = HopCounts()
    link = link_to(address_of(doors(), host), counts)
    assert [ask(link, b"%d" % number) for number in range(3)] == [b"answer to %d" % number for number in range(3)]
    assert counts.trips == 3
    assert 0 <= counts.hop_s <= counts.wait_s
    link.close()


def test_a_door_is_one_address_however_often_it_is_asked(doors: Callable[..., HopDoor]) -> None:
    door = doors()
    assert door.local() == door.local() and door.at(TCP) == door.at(TCP)
    assert door.at(TCP).secret == door.local().secret != doors().local().secret
    assert door.at(TCP).secret.hex() not in repr(door.at(TCP)) and repr(door.at(TCP).secret) not in repr(door.at(TCP))


def test_a_range_of_ports_is_kept_to(doors: Callable[..., HopDoor]) -> None:
    with socket.create_server((TCP, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(NoPort, match=rf"{TCP} on ports {port} to {port} \(K3RAY_PORTS\)"):
            doors().at(TCP, (port, port))
        door = doors()
        last = next(one for one in range(port + 1, port + 200) if is_free(one))
        assert port < door.at(TCP, (port, last)).port <= last
        link = link_to(door.at(TCP))
        assert ask(link, b"x") == b"answer to x"
        link.close()


def is_free(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex((TCP, port)) != 0


def test_only_the_address_that_was_asked_for_listens(doors: Callable[..., HopDoor]) -> None:
    port = doors().at("127.0.0.2").port
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((TCP, port), 5)


def test_one_request_is_computed_at_a_time_and_every_stage_gets_its_own_answer(doors: Callable[..., HopDoor]) -> None:
    at_work, most = [], []

    def answering(message: pa.Buffer) -> pa.Buffer:
        at_work.append(1)
        most.append(len(at_work))
        time.sleep(0.002)
        at_work.pop()
        return echo(message)

    address = doors(answering).at(TCP)

    def stage(name: int) -> bool:
        link = link_to(address)
        found = [ask(link, b"%d.%d" % (name, n)) == b"answer to %d.%d" % (name, n) for n in range(15)]
        link.close()
        return all(found)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(stage, range(4)))
    assert max(most) == 1 and len(most) == 60


def test_a_wrong_secret_is_never_let_in(doors: Callable[..., HopDoor]) -> None:
    asked: list[bytes] = []

    def answering(message: pa.Buffer) -> pa.Buffer:
        asked.append(message.to_pybytes())
        return message

    address = replace(doors(answering).at(TCP), secret=b"guess" * 7)
    link = link_to(address, patience_s=0.2)
    with pytest.raises(ShardUnreachable, match="closed the connection before it had proven itself"):
        ask(link, b"x")
    with connect(address, 5) as stranger:  # a request without any proof
        send_frame(stranger, HopFrame(REQUEST, 1, 0, pa.py_buffer(bytes(200))))
        stranger.settimeout(5)
        said = b""
        while part := stranger.recv(1000):
            said += part
    assert len(said) == len(hop_door_greeting()) and asked == []
    link.close()


def hop_door_greeting() -> bytes:
    return b"k3ray-hop-1\n" + bytes(32)


def test_strangers_who_hang_keep_nobody_out(doors: Callable[..., HopDoor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hop_door, "MAX_STRANGERS", 3)
    door = doors(proof_s=60.0)
    address = door.at(TCP)
    silent = [socket.create_connection((TCP, address.port), 5) for _ in range(10)]
    link = link_to(address)
    assert ask(link, b"x") == b"answer to x"
    for one in silent:  # the seven oldest were closed: the last three may stay
        one.settimeout(5 if one in silent[:7] else 0.05)
    assert all(ends(one) for one in silent[:7])
    for one in silent:
        one.close()
    link.close()


def ends(connection: socket.socket) -> bool:
    try:
        while connection.recv(1000):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


def test_a_length_bomb_ends_only_its_own_connection(doors: Callable[..., HopDoor]) -> None:
    address = doors().local()
    link = link_to(address)
    assert ask(link, b"1") == b"answer to 1"
    with connect(address, 5) as bomber:
        answer(bomber, address.secret, 5)
        bomber.sendall(HEADER.pack(REQUEST, 1, 0, 1 << 60))
        bomber.settimeout(5)
        assert bomber.recv(1) == b""
    assert ask(link, b"2") == b"answer to 2"
    link.close()


def test_an_asker_that_goes_in_the_middle_of_a_frame_harms_nobody(doors: Callable[..., HopDoor]) -> None:
    address = doors().local()
    with connect(address, 5) as half:
        answer(half, address.secret, 5)
        half.sendall(HEADER.pack(REQUEST, 1, 0, 100) + b"half")
    link = link_to(address)
    assert ask(link, b"x") == b"answer to x"
    link.close()


def test_a_process_out_of_threads_answers_when_it_has_one_again(
    doors: Callable[..., HopDoor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The door's own thread must not end with the first connection that finds none."""
    address, start, refused = doors().at(TCP), threading.Thread.start, list[str]()

    def none_left(thread: threading.Thread) -> None:
        if thread.name == "k3ray-hop" and len(refused) < 3:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", none_left)
    link = link_to(address)
    assert within(10, lambda: ask(link, b"x")) == b"answer to x" and len(refused) == 3
    link.close()
