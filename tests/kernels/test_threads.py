"""The row pool: every row once, errors carried, nobody waited for in vain, nothing left behind."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest

from k3ray.kernels.threads import LARGEST_BLOCK_BYTES, SMALLEST_BLOCK_BYTES, RowPool, block_rows


def _pool_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("k3ray-rows")]


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 64, 1001])
@pytest.mark.parametrize("block", [None, 1, 3, 64, 5000])
def test_every_row_exactly_once(threads: int, rows: int, block: int | None) -> None:
    visits = np.zeros(rows, np.int64)
    lock = threading.Lock()

    def count(step: int, low: int, high: int) -> None:
        assert low < high
        with lock:
            visits[low:high] += step

    with RowPool(threads) as pool:
        for _ in range(3):
            pool.run(count, rows, 7, block_rows=block)
    assert visits.tolist() == [21] * rows


def test_a_slow_block_does_not_hold_the_others_up() -> None:
    rest_done = threading.Event()
    done: list[int] = []

    def work(low: int, high: int) -> None:
        if low == 0:  # whoever has block 0 waits until somebody else has done all the other blocks
            assert rest_done.wait(20)
        else:
            done.append(low)
            if len(done) == 7:
                rest_done.set()

    with RowPool(2) as pool:
        pool.run(work, 8, block_rows=1)
    assert sorted(done) == list(range(1, 8))


@pytest.mark.parametrize("place", ["caller", "worker"])
def test_an_exception_in_any_thread_is_raised_and_the_pool_lives_on(place: str) -> None:
    caller = threading.get_ident()
    raised = threading.Event()

    def work(low: int, high: int) -> None:
        if (threading.get_ident() == caller) == (place == "caller"):
            raised.set()
            raise ZeroDivisionError(f"rows {low} to {high}")
        assert raised.wait(20)

    def fine(low: int, high: int) -> None:
        ran.append(low)

    ran: list[int] = []
    with RowPool(2) as pool:
        with pytest.raises(ZeroDivisionError, match="rows"):
            pool.run(work, 50, block_rows=1)
        pool.run(fine, 5, block_rows=1)
    assert sorted(ran) == [0, 1, 2, 3, 4]


def test_an_error_is_raised_only_when_no_thread_works_any_more() -> None:
    caller = threading.get_ident()
    started, left = threading.Event(), threading.Event()

    def work(low: int, high: int) -> None:
        if threading.get_ident() == caller:
            assert started.wait(20)
            raise KeyboardInterrupt
        started.set()
        time.sleep(0.05)
        left.set()

    with RowPool(2) as pool:
        with pytest.raises(KeyboardInterrupt):
            pool.run(work, 2, block_rows=1)
        assert left.is_set()


def test_one_caller_at_a_time() -> None:
    with RowPool(2) as pool:

        def nested(low: int, high: int) -> None:
            pool.run(nested, 8, block_rows=1)

        with pytest.raises(RuntimeError, match="one caller at a time"):
            pool.run(nested, 8, block_rows=1)


def test_close_leaves_no_threads_and_says_so_afterwards() -> None:
    before = set(_pool_threads())
    pools = [RowPool(3) for _ in range(20)]
    assert len(set(_pool_threads()) - before) == 40
    for pool in pools:
        pool.run(lambda low, high: None, 10, block_rows=1)
        pool.close()
        pool.close()
    assert set(_pool_threads()) <= before
    with pytest.raises(RuntimeError, match="closed"):
        pools[0].run(lambda low, high: None, 10)


def test_a_forgotten_pool_ends_its_threads() -> None:
    pool = RowPool(4)
    threads = list(pool._workers)
    del pool
    gc.collect()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_no_array_is_kept_after_the_run() -> None:
    class Array(np.ndarray):
        pass

    array = np.zeros(8).view(Array)
    kept = weakref.ref(array)
    with RowPool(3) as pool:
        for _ in range(50):
            pool.run(lambda a, low, high: None, 8, array, block_rows=1)
        del array
        deadline = time.monotonic() + 10
        while kept() is not None and time.monotonic() < deadline:  # a worker may be on its way back to sleep
            time.sleep(0.001)
        assert kept() is None


def test_workers_are_pinned_and_the_caller_is_not() -> None:
    mine = os.sched_getaffinity(0)
    core = max(mine)
    caller = threading.get_ident()
    seen: dict[bool, set[int]] = {}
    both = threading.Barrier(2)

    def work(low: int, high: int) -> None:
        both.wait(20)
        seen[threading.get_ident() == caller] = set(os.sched_getaffinity(0))

    with RowPool(2, cores=[core]) as pool:
        pool.run(work, 2, block_rows=1)
    assert seen == {True: mine, False: {core}}
    assert os.sched_getaffinity(0) == mine


def test_a_forked_child_without_the_workers_still_gets_its_work_done() -> None:
    script = """
import os, sys
from k3ray.kernels.threads import RowPool
pool, rows = RowPool(3), []
pool.run(lambda low, high: None, 10, block_rows=1)
child = os.fork()
if child == 0:
    pool.run(lambda low, high: rows.append(low), 10, block_rows=1)
    os._exit(0 if rows == [0] else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", script], timeout=60, check=False).returncode == 0


def test_a_pool_needs_a_thread() -> None:
    with pytest.raises(ValueError, match="at least one thread"):
        RowPool(0)


@pytest.mark.parametrize("multiple", [1, 16])
def test_blocks_are_shared_fairly_and_never_too_small(multiple: int) -> None:
    for rows, row_bytes, threads in [(12288, 14336, 2), (7, 14336, 2), (100000, 4, 8), (1, 1, 1), (5000, 0, 3)]:
        block = block_rows(rows, row_bytes, threads, multiple)
        assert block % multiple == 0
        assert block * row_bytes >= SMALLEST_BLOCK_BYTES or row_bytes == 0
        assert (block - multiple) * row_bytes <= max(LARGEST_BLOCK_BYTES, SMALLEST_BLOCK_BYTES + row_bytes)
    assert -(-3072 // block_rows(3072, 1904, 2, multiple)) == 8
    assert -(-12288 // block_rows(12288, 14336, 2, multiple)) > 100
