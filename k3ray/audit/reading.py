"""Reads of different files at once, in threads that nothing waits for: an interruption or an error ends them all.

A thread that sits in a request cannot be woken, so it is a daemon: whoever reads goes on without it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Result = TypeVar("Result")
FAILURE_GRACE_S, INTERRUPTION_GRACE_S = 3.0, 0.5  # for jobs that run when no result is wanted any more
Ended = tuple[int, object, BaseException | None]  # number of the job, its result, its error


def read_each(jobs: Sequence[Callable[[], Result]], at_once: int) -> Iterator[Result]:
    """Run the jobs, so many at once, and give their results in the jobs' order; raises the first error that comes.

    Whatever is raised here, KeyboardInterrupt included, begins no job any more; one that runs has a moment to end in
    order, and is then left alone.
    """
    waiting = iter(enumerate(jobs))
    lock, stopped = threading.Lock(), threading.Event()
    ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()

    def work() -> None:
        while not stopped.is_set():
            with lock:
                number, job = next(waiting, (0, None))
            if job is None:
                return
            try:
                ended.put((number, job(), None))
            except BaseException as error:  # noqa: BLE001 - a thread answers for itself: the reader raises it again
                ended.put((number, None, error))
                return

    threads = [
        threading.Thread(target=work, daemon=True, name=f"audit {number}") for number in range(min(at_once, len(jobs)))
    ]
    grace_s = FAILURE_GRACE_S
    try:
        for thread in threads:
            thread.start()
        yield from _in_order(ended, len(jobs))
    except KeyboardInterrupt:
        grace_s = INTERRUPTION_GRACE_S
        raise
    finally:
        stopped.set()
        _join(threads, grace_s)


def _join(threads: Sequence[threading.Thread], grace_s: float) -> None:
    """Wait for the threads, for so long in all."""
    until = time.monotonic() + grace_s
    for thread in threads:
        if thread.ident is not None:  # it was started
            thread.join(max(until - time.monotonic(), 0.0))


def _in_order(ended: queue.SimpleQueue[Ended], count: int) -> Iterator[Result]:
    ready: dict[int, Result] = {}
    for wanted in range(count):
        while wanted not in ready:
            number, result, error = ended.get()
            if error is not None:
                raise error
            ready[number] = result  # type: ignore[assignment]  # a job's own result
        yield ready.pop(wanted)
