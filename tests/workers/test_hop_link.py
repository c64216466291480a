"""A link to a door: cut, replaced, refused or left half way, it gives the right answer or the right failure."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

import pyarrow as pa
import pytest

from k3ray.workers import hop_frames
from k3ray.workers.experts import MissingExpert
from k3ray.workers.hop_address import DoorAddress, wake
from k3ray.workers.hop_door import HopDoor
from k3ray.workers.hop_failures import ShardFailure
from k3ray.workers.hop_frames import FrameTooLarge
from k3ray.workers.hop_link import HopLink, ShardUnreachable
from k3ray.workers.shard_link import ReplaceableShard, ShardGone
from tests.hop_ends import LOCAL, TCP, address_of, ask, echo, link_to, opened_doors, within


@pytest.fixture
def doors() -> Iterator[Callable[..., HopDoor]]:
    with opened_doors() as make:
        yield make


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


@pytest.mark.parametrize("host", [LOCAL, TCP])
def test_an_answer_that_was_read_half_way_is_never_read_on(
    doors: Callable[..., HopDoor], monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """No memory for an answer, or an interrupt in the middle of it: what is left of it is no frame."""
    link = link_to(address_of(doors(), host))
    assert ask(link, b"1") == b"answer to 1"
    ticket, allocate = link.submit(pa.py_buffer(b"2")), pa.allocate_buffer

    def nothing_left(size: int) -> pa.Buffer:
        if threading.current_thread() is threading.main_thread():  # the door reads the request in another
            raise MemoryError
        return allocate(size)

    with monkeypatch.context() as without_memory:
        without_memory.setattr("k3ray.workers.hop_frames.pa.allocate_buffer", nothing_left)
        with pytest.raises(MemoryError):
            link.collect(ticket)
    assert within(10, lambda: ask(link, b"3")) == b"answer to 3"
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


def test_reaching_for_a_shard_asks_it_nothing_and_says_nothing(doors: Callable[..., HopDoor]) -> None:
    asked: list[bytes] = []
    door = doors(lambda message: asked.append(message.to_pybytes()) or echo(message))
    address, found = door.at(TCP), [replace(door.at(TCP), port=1)]
    link = HopLink(lambda given_up: found[0])
    link.reach()
    assert link.unreached(0) is None  # nobody waits for it
    found[0] = address
    link.reach()
    link.reach()
    assert len(door._friends) + len(door._strangers) == 1 and not asked
    assert ask(link, b"1") == b"answer to 1" and asked == [b"1"]
    link.close()
    link.reach()


def test_who_was_reached_once_is_tried_for_as_long_as_it_takes(doors: Callable[..., HopDoor]) -> None:
    """Its replacement may take longer than any patience to load; meanwhile the link says what it meets."""
    door = doors()
    closed = address_of(doors(), TCP)
    found: list[DoorAddress | None] = [door.at(TCP)]

    def find(given_up: Callable[[], bool]) -> DoorAddress:
        if found[0] is None:
            raise ConnectionError("not answered")
        return found[0]

    link = HopLink(find, patience_s=0.05)
    assert ask(link, b"1") == b"answer to 1" and link.unreached(4) is None
    found[0] = replace(closed, port=1)
    for one in list(door._friends):
        wake(one)
    asking = ThreadPoolExecutor(1)
    answer = asking.submit(ask, link, b"2")
    while (unreached := link.unreached(4)) is None or unreached.seconds < 0.3:
        assert not wait([answer], 0.01).done
    assert unreached.shard == 4 and unreached.before and f"{TCP} port 1 has not let us in" in unreached.refused
    found[0] = None
    while "not answered" not in (unreached := link.unreached(4)).refused:
        assert not wait([answer], 0.01).done
    assert unreached.refused == f"{door.at(TCP)} has not let us in (not answered)"
    found[0] = door.at(TCP)
    assert answer.result(10) == b"answer to 2" and link.unreached(4) is None
    asking.shutdown()
    link.close()


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
    try:
        assert asked.wait(5)
        assert shard.replace(new, 1) is old
        old.close()
        assert wait([found], 5).done, "it waits for the one that is gone"
        assert found.result() == b"answer to x"
    finally:
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
