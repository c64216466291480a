"""Runs file jobs in several threads, and ends them: a failure of one file leaves the others, an interruption none.

The threads are daemons: one that waits for a silent server keeps nobody, and what it had received is flushed for it.
They say themselves that they have ended: Thread.join, interrupted by Ctrl-C, takes a running thread for an ended one.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from k3ray.download.file_fetch import FetchFailed
from k3ray.download.part_file import PartClosed
from k3ray.download.stream import Line, Stopped

LOOK_EVERY_S = 0.1


class Job(Protocol):
    """The work on one file."""

    def run(self) -> None:
        """Do it."""

    def halt(self) -> None:
        """Flush and close what it holds, from another thread."""


class _Crew:
    """The jobs that wait, those begun, what came of them, and the threads that have ended."""

    def __init__(self, jobs: Sequence[Job], line: Line) -> None:
        self.begun: list[Job] = []
        self.failures: list[FetchFailed] = []
        self.fatal: list[BaseException] = []
        self.ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._waiting = deque(jobs)
        self._line = line

    def work(self) -> None:
        """One thread's life."""
        try:
            while not self._line.stop.is_set() and self._waiting:
                try:
                    job = self._waiting.popleft()
                except IndexError:  # another thread was faster
                    return
                self.begun.append(job)
                self._run(job)
        finally:
            self.ended.put(None)

    def _run(self, job: Job) -> None:
        try:
            job.run()
        except FetchFailed as failure:
            self.failures.append(failure)
        except (Stopped, PartClosed):
            pass  # the stop is set
        except BaseException as error:  # noqa: BLE001 - a thread answers for itself: the main one raises it again
            self.fatal.append(error)
            self._line.stop.set()


def run_jobs(
    jobs: Sequence[Job], workers: int, line: Line, grace_s: float, look: Callable[[], None]
) -> list[FetchFailed]:
    """Run the jobs in order, so many at once; returns the files that failed, raises what no file can go on after.

    look: called in this thread now and then. A KeyboardInterrupt here stops every job and goes on upwards.
    """
    crew = _Crew(jobs, line)
    working = 0
    try:
        for number in range(workers):
            threading.Thread(target=crew.work, daemon=True, name=f"download {number}").start()
            working += 1
        while working and not line.stop.is_set():
            with suppress(queue.Empty):
                crew.ended.get(timeout=LOOK_EVERY_S)
                working -= 1
            look()
    finally:
        if working:
            _end(crew, working, line, grace_s)
    if crew.fatal:
        raise crew.fatal[0]
    return crew.failures


def _end(crew: _Crew, working: int, line: Line, grace_s: float) -> None:
    """Let every thread end; flush for one that is silent."""
    line.stop.set()
    until = time.monotonic() + grace_s
    with suppress(queue.Empty):
        for _ in range(working):
            crew.ended.get(timeout=max(until - time.monotonic(), 0.001))
    for job in list(crew.begun):
        with suppress(OSError):  # a full disk: what was journalled before is there
            job.halt()
