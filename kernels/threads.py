"""Rows over threads: a pool that runs one kernel over disjoint blocks of rows.

It knows nothing of matrices. Threads split rows, never a sum, so a result cannot depend on their number.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

BLOCKS_PER_THREAD = 4  # at least, where the blocks stay large enough
SMALLEST_BLOCK_BYTES = 64 * 1024  # of weights: about six microseconds of memory, a few times what claiming costs
LARGEST_BLOCK_BYTES = 1024 * 1024  # about a tenth of a millisecond: what the others may wait for a slowed thread


def block_rows(rows: int, row_bytes: int, threads: int, multiple: int = 1) -> int:
    """Rows of a block of work: enough blocks to share fairly, none so small that claiming it costs more than it does.

    `row_bytes` is what a row brings from memory; the answer is a multiple of `multiple`.
    """
    fair = -(-rows // (BLOCKS_PER_THREAD * threads))
    smallest = -(-SMALLEST_BLOCK_BYTES // max(1, row_bytes))
    largest = max(1, LARGEST_BLOCK_BYTES // max(1, row_bytes))
    return -(-max(min(fair, largest), smallest) // multiple) * multiple


class _Task:
    """One run: blocks of rows, claimed by whoever is free."""

    __slots__ = ("arguments", "block_rows", "blocks", "claims", "error", "function", "rows")

    def __init__(self, function: Callable[..., Any], rows: int, block_rows: int, arguments: tuple[Any, ...]) -> None:
        self.function = function
        self.arguments = arguments
        self.rows = rows
        self.block_rows = block_rows
        self.blocks = -(-rows // block_rows)
        self.claims = itertools.count()  # next() on it is atomic
        self.error: BaseException | None = None

    def work(self) -> None:
        """Claim blocks until none is left or one of them has failed in any thread."""
        while self.error is None and (block := next(self.claims)) < self.blocks:
            low = block * self.block_rows
            try:
                self.function(*self.arguments, low, min(low + self.block_rows, self.rows))
            except BaseException as error:  # noqa: BLE001 - carried to the caller's thread, which raises it
                self.error = error


class _Bench:
    """What a pool and its workers share; the workers hold no reference to the pool, so a dropped pool ends them."""

    __slots__ = ("closed", "engaged", "process", "task", "wakes")

    def __init__(self, workers: int) -> None:
        self.task: _Task | None = None
        self.closed = False
        self.process = os.getpid()
        self.wakes = [threading.Lock() for _ in range(workers)]
        self.engaged = [threading.Lock() for _ in range(workers)]  # held while a worker may touch a task's arguments
        for wake in self.wakes:
            wake.acquire()

    def wake(self) -> None:
        for wake in self.wakes:
            if wake.locked():  # else the worker has not yet woken from the last time, and will see the new task
                wake.release()

    def close(self) -> None:
        self.closed = True
        self.wake()

    def serve(self, index: int, core: int | None) -> None:
        """A worker's life: sleep, help with the task of the day, sleep."""
        if core is not None:
            os.sched_setaffinity(0, {core})  # 0 is the calling thread
        while True:
            self.wakes[index].acquire()
            if self.closed:
                return
            with self.engaged[index]:
                task = self.task
                if task is not None:
                    task.work()
                del task  # a sleeping worker keeps no array alive

    def share(self, task: _Task) -> None:
        """Do the task with the workers; raise its first error once no thread touches its arguments any more.

        A worker that has not woken by the time the last block is claimed is not waited for: it finds no task.
        """
        self.task = task
        try:
            self.wake()
            task.work()
        except BaseException as interrupt:  # noqa: BLE001 - raised below, when the workers have let go
            task.error = interrupt
        self.task = None
        for engaged in self.engaged:
            task.error = _pass(engaged) or task.error
        if task.error is not None:
            raise task.error


def _pass(lock: threading.Lock) -> BaseException | None:
    """Wait until the lock is free, interrupted or not; the interrupt is returned, to be raised when it is safe."""
    interrupted = None
    while True:
        try:
            with lock:
                return interrupted
        except KeyboardInterrupt as interrupt:
            interrupted = interrupt


class RowPool:
    """The caller's thread and `threads - 1` workers, one task at a time.

    `cores` pins the workers (never the caller): worker i to cores[i % len(cores)].
    """

    def __init__(self, threads: int, cores: Sequence[int] = ()) -> None:
        if threads < 1:
            raise ValueError(f"a pool needs at least one thread, not {threads}")
        self.threads = threads
        self._busy = threading.Lock()
        self._bench = _Bench(threads - 1)
        self._workers = [
            threading.Thread(
                target=self._bench.serve,
                args=(index, cores[index % len(cores)] if cores else None),
                name=f"k3ray-rows-{index + 1}",
                daemon=True,
            )
            for index in range(threads - 1)
        ]
        for worker in self._workers:
            worker.start()
        self._ending = weakref.finalize(self, self._bench.close)

    def run(self, function: Callable[..., Any], rows: int, *arguments: Any, block_rows: int | None = None) -> None:
        """Call `function(*arguments, low, high)` over disjoint blocks that cover range(rows).

        `function` must release the GIL to gain anything. The first exception of any block is raised here, after
        every thread has let go of the arguments. Raises RuntimeError when the pool is closed or already running.
        """
        if self._bench.closed:
            raise RuntimeError("the pool is closed")
        if rows <= 0:
            return
        if block_rows is None:
            block_rows = -(-rows // (BLOCKS_PER_THREAD * self.threads))
        if (
            self.threads == 1 or block_rows >= rows or os.getpid() != self._bench.process
        ):  # a fork leaves threads behind
            function(*arguments, 0, rows)
            return
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("the pool is running another task: one caller at a time")
        try:
            self._bench.share(_Task(function, rows, max(1, block_rows), arguments))
        finally:
            self._busy.release()

    def close(self) -> None:
        """End the workers; returns when their threads are gone. Closing twice does nothing."""
        self._ending()
        for worker in self._workers:
            worker.join()

    def __enter__(self) -> RowPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
