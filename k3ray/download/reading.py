"""Reading many files in a few threads: how far it is, told onwards, and an end to it when it is interrupted."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

MAX_THREADS = 4

Item = TypeVar("Item")
Result = TypeVar("Result")


class ReadingStopped(Exception):
    """Another thread ended the reading."""


class Reading:
    """Bytes read of those that will be. look: told (bytes read, bytes to read), by one thread at a time."""

    def __init__(self, look: Callable[[int, int], None]) -> None:
        self._look = look
        self._done = self._total = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def expect(self, more: int) -> None:
        """More bytes will be read."""
        with self._lock:
            self._total += more
            self._look(self._done, self._total)

    def read(self, count: int) -> None:
        """So many were; raises ReadingStopped."""
        if self._stop.is_set():
            raise ReadingStopped
        with self._lock:
            self._done += count
            self._look(self._done, self._total)

    def threads(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """The function's result for each item, in their order; whatever ends it here ends it in every thread."""
        with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
            try:
                return list(pool.map(function, items))
            except BaseException:
                self._stop.set()
                raise
