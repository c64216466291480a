"""How commands speak: plain lines on standard error, so that standard output holds only what was asked for.

On a terminal long work shows a bar; elsewhere it prints a line now and then.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import Any

from k3ray.amounts import decimal_size, duration
from k3ray.workers.failure import Failure

SECONDS_BETWEEN_LINES = 10.0


def say(line: str) -> None:
    """Print one line about the run."""
    print(line, file=sys.stderr, flush=True)


class StandardOutputLost(Failure):
    """What was generated cannot be shown any more: a pipe that was closed, a disk that is full."""


def print_now(text: str) -> None:
    """Print a part of the answer; StandardOutputLost the first time that it cannot be, afterwards it goes nowhere."""
    try:
        print(text, end="", flush=True)
    except OSError as error:
        with suppress(OSError, ValueError):  # nothing buffered may complain again when Python ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise StandardOutputLost(
            f"standard output: {error.strerror}; the run was ended, and what was generated until then is kept where "
            "--out or --save-state was given"
        ) from None


def start_bar() -> Any:
    """A running bar of bytes, their rate and the time left, of rich; None where standard error is no terminal."""
    if not sys.stderr.isatty():
        return None
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    bar = Bar(*columns, TimeRemainingColumn(), console=console, transient=True, speed_estimate_period=60)
    bar.start()
    return bar


class Progress:
    """How far a long piece of work is, in bytes."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._bar: Any = None
        self._task: Any = None
        self._said = time.monotonic()
        self._said_done = 0

    def __enter__(self) -> Progress:
        self._bar = start_bar()
        if self._bar is not None:
            self._task = self._bar.add_task(self._doing)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, total: int) -> None:
        """Say that `done` of `total` bytes are finished."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
        elif (passed := time.monotonic() - self._said) > SECONDS_BETWEEN_LINES:
            rate = (done - self._said_done) / passed
            self._said, self._said_done = time.monotonic(), done
            say(f"{self._doing}: {decimal_size(done)} of {decimal_size(total)}{pace(total - done, rate)}")


def pace(left: int, bytes_per_s: float) -> str:
    """The end of a line about bytes: how fast they come and when the rest is there; nothing while none come."""
    if bytes_per_s <= 0:
        return ""
    return f", {decimal_size(int(bytes_per_s))}/s, about {duration(left / bytes_per_s)} left"
