"""A door and links to it: whoever hangs, cuts, floods or dies, the others are answered, each with his own answer."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

import pyarrow as pa
import pytest

from k3ray.workers import hop_door, hop_frames
from k3ray.workers.experts import MissingExpert
from k3ray.workers.hop_address import DoorAddress, NoPort, connect, wake
from k3ray.workers.hop_door import HopDoor
from k3ray.workers.hop_failures import ShardFailure
from k3ray.workers.hop_frames import HEADER, REQUEST, FrameTooLarge, HopFrame, send_frame
from k3ray.workers.hop_link import HopCounts, HopLink, ShardUnreachable
from k3ray.workers.hop_secret import answer
from k3ray.workers.shard_link import ReplaceableShard, ShardGone

Answer = Callable[[pa.Buffer], pa.Buffer]
LOCAL, TCP, TCP6 = "", "127.0.0.1", "::1"


def echo(message: pa.Buffer) -> pa.Buffer:
    return pa.py_buffer(b"answer to " + message.to_pybytes())


@pytest.fixture
def doors() -> Iterator[Callable[..., HopDoor]]:
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


@pytest.mark.parametrize("size", [14_384, 920_560, 7_340_576])
@pytest.mark.parametrize("host", [LOCAL, TCP])
def test_frames_of_a_prompt_go_both_ways_whole(doors: Callable[..., HopDoor], host: str, size: int) -> None:
    link = link_to(address_of(doors(lambda message: message), host))
    text = bytes(range(251)) * (size // 251)
    assert ask(link, text) == text
    link.close()


def test_a_failure_is_raised_as_it_was_and_the_next_request_is_answered(doors: Callable[..., HopDoor]) -> None:
    def answering(message: pa.Buffer) -> pa.Buffer:
        if message.to_pybytes() == b"missing":
            raise MissingExpert("layer 3 expert 5")
        if message.to_pybytes() == b"mistake":
            raise ZeroDivisionError("one by nothing")
        return echo(message)

    link = link_to(doors(answering).local())
    with pytest.raises(MissingExpert, match="layer 3 expert 5"):
        ask(link, b"missing")
    with pytest.raises(ShardFailure, match="ZeroDivisionError: one by nothing"):
        ask(link, b"mistake")
    assert ask(link, b"x") == b"answer to x"
    link.close()


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


def test_an_answer_that_nobody_collected_is_not_given_to_the_next_request(doors: Callable[..., HopDoor]) -> None:
    """A step that failed half way leaves large answers behind: both ends would wait for each other to read."""
    link = link_to(doors(lambda message: pa.py_buffer(message.to_pybytes() * 2)).local())

    def step() -> bytes:
        link.submit(pa.py_buffer(b"left" * 1_000_000))
        second = link.submit(pa.py_buffer(b"next" * 1_000_000))
        third = link.submit(pa.py_buffer(b"last"))
        return link.collect(third).to_pybytes() + link.collect(second).to_pybytes()

    assert within(20, step) == b"lastlast" + b"next" * 2_000_000
    link.close()


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


def test_a_connection_that_is_cut_is_made_again_and_the_request_sent_again(doors: Callable[..., HopDoor]) -> None:
    asked: list[bytes] = []

    def answering(message: pa.Buffer) -> pa.Buffer:
        asked.append(message.to_pybytes())
        if len(asked) == 2:
            for one in list(door._friends):
                wake(one)
        return echo(message)

    door = doors(answering)
    link = link_to(door.at(TCP))
    assert ask(link, b"1") == b"answer to 1"
    assert ask(link, b"2") == b"answer to 2"
    assert asked == [b"1", b"2", b"2"]
    link.close()


def test_a_request_that_breaks_every_connection_is_given_up(doors: Callable[..., HopDoor]) -> None:
    def answering(message: pa.Buffer) -> pa.Buffer:
        for one in list(door._friends):
            wake(one)
        return message

    door = doors(answering)
    link = link_to(door.local())
    with pytest.raises(ShardUnreachable, match="broke under one request"):
        ask(link, b"x")
    link.close()


def test_a_shard_that_lives_and_cannot_be_reached_is_told_with_its_port(doors: Callable[..., HopDoor]) -> None:
    door = doors()
    address = door.at(TCP)
    door.close()
    link = link_to(address, patience_s=0.1)
    with pytest.raises(ShardUnreachable, match=rf"{TCP} port {address.port} has not let us in.*firewall"):
        ask(link, b"x")


def test_a_message_that_nobody_takes_is_a_failure_of_the_step(
    doors: Callable[..., HopDoor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hop_frames, "MAX_FRAME_BYTES", 1000)
    link = link_to(doors(lambda message: pa.py_buffer(bytes(2000)) if message.size == 7 else message).local())
    with pytest.raises(FrameTooLarge, match="2,000 bytes"):
        ask(link, b"seven..")
    with pytest.raises(FrameTooLarge, match="1,001 bytes"):
        ask(link, bytes(1001))
    assert ask(link, b"small") == b"small"
    link.close()


def test_a_shard_that_is_replaced_while_it_is_waited_for(doors: Callable[..., HopDoor]) -> None:
    """The old one hangs, as on a host that is gone without a word; the wait ends, and the new one is asked."""
    hung, asked = threading.Event(), threading.Event()

    def hanging(message: pa.Buffer) -> pa.Buffer:
        asked.set()
        hung.wait(20)
        return message

    old, new = link_to(doors(hanging).at(TCP)), link_to(doors().at(TCP))
    shard = ReplaceableShard(old)
    found: Future[bytes] = Future()

    def step() -> None:
        found.set_result(shard.collect(shard.submit(pa.py_buffer(b"x"))).to_pybytes())

    threading.Thread(target=step, daemon=True).start()
    assert asked.wait(5)
    unused = shard.replace(new, 1)
    assert unused is old
    old.close()
    assert wait([found], 5).done, "it waits for the one that is gone"
    assert found.result() == b"answer to x"
    hung.set()
    new.close()


def test_a_link_whose_shard_is_gone_says_so_until_it_is_replaced(doors: Callable[..., HopDoor]) -> None:
    def gone(given_up: Callable[[], bool]) -> DoorAddress:
        raise ShardGone("killed")

    link = HopLink(gone)
    ticket = link.submit(pa.py_buffer(b"x"))  # raises nothing: the wait for a replacement is collect's
    with pytest.raises(ShardGone, match="killed"):
        link.collect(ticket)
    new = link_to(doors().local())
    shard = ReplaceableShard(link)
    asked = shard.submit(pa.py_buffer(b"y"))
    shard.replace(new, 1)
    assert shard.collect(asked).to_pybytes() == b"answer to y"
    new.close()


def test_a_closed_link_makes_no_connection(doors: Callable[..., HopDoor]) -> None:
    link = link_to(doors().local())
    link.close()
    with pytest.raises(ShardGone, match="replaced"):
        ask(link, b"x")
