"""Runs file jobs in several threads, and ends them: a failure of one file leaves the others, an interruption none.

The threads are daemons: one that waits for a silent server keeps nobody, and what it had received is flushed for it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from k3ray.download.file_fetch import FetchFailed
from k3ray.download.part_file import PartClosed
from k3ray.download.stream import Line, Stopped

LOOK_EVERY_S = 0.1
GRACE_S = 2.0


class Job(Protocol):
    """The work on one file."""

    def run(self) -> None:
        """Do it."""

    def halt(self) -> None:
        """Flush and close what it holds, from another thread."""


def run_jobs(jobs: Sequence[Job], workers: int, line: Line, look: Callable[[], None]) -> list[FetchFailed]:
    """Run the jobs in order, so many at once; returns the files that failed, raises what no file can go on after.

    look: called in this thread now and then. A KeyboardInterrupt here stops every job and goes on upwards.
    """
    waiting = deque(jobs)
    running: list[Job] = []
    failures: list[FetchFailed] = []
    fatal: list[BaseException] = []

    def work() -> None:
        while not line.stop.is_set():
            try:
                job = waiting.popleft()
            except IndexError:
                return
            running.append(job)
            try:
                job.run()
            except FetchFailed as failure:
                failures.append(failure)
            except (Stopped, PartClosed):
                return
            except BaseException as error:  # noqa: BLE001 - a thread answers for itself: the main one raises it again
                fatal.append(error)
                line.stop.set()

    threads = [threading.Thread(target=work, daemon=True, name=f"download {n}") for n in range(workers)]
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and not line.stop.is_set():
            threads[-1].join(LOOK_EVERY_S) if threads[-1].is_alive() else threading.Event().wait(LOOK_EVERY_S)
            look()
    finally:
        _end(threads, list(running), line)
    if fatal:
        raise fatal[0]
    return failures


def _end(threads: list[threading.Thread], running: list[Job], line: Line) -> None:
    """Let every thread end; flush for one that is silent."""
    if not any(thread.is_alive() for thread in threads):
        return
    line.stop.set()
    for thread in threads:
        if thread.ident is not None:
            thread.join(GRACE_S / len(threads))
    for job in running:
        with suppress(OSError):  # a full disk: what was journalled before is there
            job.halt()
