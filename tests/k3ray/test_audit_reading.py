"""Reads at once: their results in order, the first error at once, and an interruption that waits for no server."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3ray.audit import reading
from k3ray.audit.reading import read_each
from tests.range_server import Answer, Request, serve


@given(st.integers(0, 23), st.integers(1, 9))
def test_results_come_in_the_jobs_order(count: int, at_once: int) -> None:
    assert list(read_each([partial(pow, number, 2) for number in range(count)], at_once)) == [
        number**2 for number in range(count)
    ]


def test_no_more_than_so_many_run_at_once() -> None:
    running, most, lock, met = 0, 0, threading.Lock(), threading.Barrier(3)

    def job() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        met.wait()  # all three are here before one goes on
        with lock:
            running -= 1

    list(read_each([job] * 9, 3))
    assert most == 3


def test_the_first_error_is_raised_and_nothing_is_begun_after_it() -> None:
    begun: list[int] = []

    def job(number: int) -> int:
        begun.append(number)
        if number == 2:
            raise OSError("the third")
        return number

    found = []
    with pytest.raises(OSError, match="the third"):
        for result in read_each([partial(job, number) for number in range(50)], 1):
            found.append(result)
    assert (found, begun) == ([0, 1], [0, 1, 2])


def test_a_job_that_never_ends_holds_up_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "FAILURE_GRACE_S", 0.01)
    never = threading.Event()
    jobs: list[Callable[[], object]] = [never.wait, partial(int, "no number")]
    with pytest.raises(ValueError, match="no number"):
        list(read_each(jobs, 2))
    never.set()


@pytest.fixture
def stalling() -> Iterator[tuple[threading.Event, Callable[[Request, Answer], Answer]]]:
    """A fault under which the server never answers, and the event that says that somebody waits for it."""
    asked, over = threading.Event(), threading.Event()

    def stall(request: Request, answer: Answer) -> Answer:
        asked.set()
        over.wait()
        return answer

    yield asked, stall
    over.set()


@pytest.mark.parametrize("pattern", [r"config\.json", r"\.safetensors$"])
def test_an_interrupted_audit_does_not_wait_for_its_server(
    k3b_dir: Path, stalling: tuple[threading.Event, Callable[[Request, Answer], Answer]], pattern: str
) -> None:
    """The server says nothing for ever: whoever waited would wait for the line's 30 seconds, four times."""
    asked, stall = stalling
    with serve(k3b_dir) as server:
        server.misbehave(pattern, stall)
        code = "from k3ray.cli import main; main()"
        command = [sys.executable, "-c", code, "audit", server.address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert asked.wait(120)
                process.send_signal(signal.SIGINT)
                out, err = process.communicate(timeout=30)
            finally:
                process.kill()  # one that waits would wait longer than this test
        assert (process.returncode, out) == (130, "")
        assert err.splitlines()[-1] == "k3ray: interrupted; nothing is left running"
