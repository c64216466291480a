"""The three standard streams of a command: closed ones, messages that nobody can get, an answer that is lost."""

from __future__ import annotations

import io
import os
import select
import sys
from contextlib import suppress
from typing import Any


class _Written(io.FileIO):
    """A stream that remembers why it took nothing. forgiving: what it does not take counts as written."""

    def __init__(self, number: int, forgiving: bool) -> None:
        super().__init__(number, "w", closefd=False)
        self.failed: OSError | None = None
        self._forgiving = forgiving

    def write(self, data: Any) -> int:
        """Write what can be written now, after a wait where the other end is slow; the bytes that count as written."""
        try:
            while (written := super().write(data)) is None:
                select.select((), (self,), ())
        except OSError as error:
            self.failed = self.failed or error
            if not self._forgiving:
                raise
            return memoryview(data).nbytes
        return written


class StandardStreams:
    """The standard streams made ready for a command.

    Where a stream was closed (2>&-), what goes there goes nowhere: the next file to be opened would have its number,
    and Ray asks for a standard error. Where standard error is a full disk or a pipe whose reader is gone, messages are
    lost without a word, as there is nowhere to say it: the work and its exit code stay what they are.
    """

    def __init__(self) -> None:
        _open_closed_streams()
        self._output: _Written | None = None
        output, errors = sys.__stdout__, sys.__stderr__
        if output is not None and sys.stdout is output:  # not where somebody else listens in
            sys.stdout, self._output = _rewired(output, forgiving=False)
        if errors is not None and sys.stderr is errors:
            sys.stderr, _ = _rewired(errors, forgiving=True)

    def lost_answer(self) -> OSError | None:
        """Why standard output took nothing more, after all that it still held was given to it; None where it did."""
        if self._output is None:
            return None
        with suppress(OSError):
            sys.stdout.flush()
        if self._output.failed is not None:  # what is still held would be given to it once more at Python's end
            with suppress(OSError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._output.fileno())
                os.close(nowhere)
        return self._output.failed


def _rewired(stream: io.TextIOWrapper[Any], forgiving: bool) -> tuple[io.TextIOWrapper[Any], _Written]:
    """The same stream over a _Written."""
    stream.flush()
    raw = _Written(stream.fileno(), forgiving)
    by_lines = stream.line_buffering or stream.write_through  # the latter: PYTHONUNBUFFERED
    text = io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=by_lines)
    return text, raw


def _open_closed_streams() -> None:
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))
