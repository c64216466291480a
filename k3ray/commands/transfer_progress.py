"""How a download is shown: a bar on a terminal, else a line now and then, with rate and time left."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from k3ray.amounts import decimal_size
from k3ray.commands.terminal import SECONDS_BETWEEN_LINES, pace, say, start_bar
from k3ray.download.counts import Reached
from k3ray.workers.counted import counted


def line_of(reached: Reached, recent_bytes_per_s: float) -> str:
    """One line about how far a download is."""
    return (
        f"downloading: {decimal_size(reached.here)} of {decimal_size(reached.of)}, "
        f"{_files(reached)}{pace(reached.of - reached.here, recent_bytes_per_s)}"
    )


def _files(reached: Reached) -> str:
    return f"{reached.files_done} of {counted(reached.num_files, 'file')}"


class TransferProgress:
    """Shows what is reached; only the thread that made it calls it."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._said = time.monotonic()
        self._said_fetched = 0

    def __enter__(self) -> TransferProgress:
        self._bar = start_bar()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, reached: Reached) -> None:
        """Show it."""
        if self._bar is not None:
            doing = f"downloading, {_files(reached)}"
            if self._task is None:  # what was here already is no speed
                self._task = self._bar.add_task(doing, completed=reached.here, total=reached.of)
            self._bar.update(self._task, completed=reached.here, total=reached.of, description=doing)
            return
        now = time.monotonic()
        if now - self._said > SECONDS_BETWEEN_LINES:
            recent = (reached.fetched - self._said_fetched) / (now - self._said)
            self._said, self._said_fetched = now, reached.fetched
            say(line_of(reached, recent))
