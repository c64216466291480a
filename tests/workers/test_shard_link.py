"""A shard that is replaced while its answer is awaited."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pyarrow as pa
import pytest

from k3ray.workers.failure import Failure
from k3ray.workers.shard_link import ReplaceableShard, ShardGone


class Shard:
    """Answers with its name and the request; or is gone, or fails."""

    def __init__(self, name: bytes, failure: Failure | None = None) -> None:
        self.name = name
        self.failure = failure
        self.asked: list[bytes] = []

    def submit(self, request: pa.Buffer) -> bytes:
        self.asked.append(request.to_pybytes())
        return self.name + b":" + request.to_pybytes()

    def collect(self, ticket: bytes) -> pa.Buffer:
        assert ticket.startswith(self.name + b":"), "a ticket of another process"
        if self.failure is not None:
            raise self.failure
        return pa.py_buffer(ticket)


REQUEST = pa.py_buffer(b"request")


def test_what_a_lost_shard_owes_is_asked_of_its_replacement() -> None:
    lost, new = Shard(b"lost", ShardGone("killed")), Shard(b"new")
    link = ReplaceableShard(lost)
    tickets = [link.submit(REQUEST), link.submit(pa.py_buffer(b"another"))]
    found: Future[list[bytes]] = Future()
    threading.Thread(
        target=lambda: found.set_result([link.collect(ticket).to_pybytes() for ticket in tickets]), daemon=True
    ).start()
    with pytest.raises(TimeoutError):
        found.result(0.05)  # it waits
    link.replace(new, 1)
    assert found.result(10) == [b"new:request", b"new:another"]
    assert lost.asked == new.asked == [b"request", b"another"]


def test_an_older_replacement_changes_nothing() -> None:
    newest = Shard(b"newest")
    link = ReplaceableShard(Shard(b"first"))
    link.replace(newest, 2)
    link.replace(Shard(b"older"), 1)
    assert link.collect(link.submit(REQUEST)).to_pybytes() == b"newest:request"


def test_a_failure_of_the_shard_is_not_a_loss() -> None:
    link = ReplaceableShard(Shard(b"one", Failure("an expert is missing")))
    with pytest.raises(Failure, match="an expert is missing"):
        link.collect(link.submit(REQUEST))
