"""How this process is ended from outside: a signal unwinds the stack, so that whatever was started is stopped.

Only the main thread may set handlers: in another thread each of these changes nothing.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)

Handler = signal.Handlers | Callable[[int, FrameType | None], None]


@contextmanager
def kept_signals() -> Iterator[None]:
    """Puts back at its end the handlers it found: Ray replaces that of SIGTERM when a driver connects."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDING)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: set by C code, cannot be put back
                signal.signal(number, handler)


@contextmanager
def unwinding_signals() -> Iterator[None]:
    """Within it a signal that would have ended the process at once raises SystemExit instead.

    A signal that is ignored (nohup) or that somebody else handles stays so.
    """
    with kept_signals():
        for number in ENDING:
            if signal.getsignal(number) is signal.SIG_DFL:
                _set(number, _unwind)
        yield


@contextmanager
def children_shielded() -> Iterator[None]:
    """Keeps the signals of a closing terminal from the processes that this thread starts within it.

    The terminal sends them to all of us, and it is for us to end the others in order. (Ray does so for Ctrl-C.) Here
    they come at the end, or at once in another thread.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGQUIT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def ignored_signals() -> Iterator[None]:
    """Within it neither Ctrl-C nor a request to end interrupts: for a short ending that must be complete."""
    with kept_signals():
        for number in (signal.SIGINT, *ENDING):
            _set(number, signal.SIG_IGN)
        yield


@contextmanager
def held_signals() -> Iterator[None]:
    """Holds Ctrl-C and requests to end until its end, for a few statements that must be done together or not at all.

    A second one comes through at once.
    """
    found = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDING)}
    handlers = {number: handler for number, handler in found.items() if callable(handler)}
    held: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        held.append((number, frame))
        if len(held) > 1:
            handlers[signal.Signals(number)](number, frame)

    try:
        with kept_signals():
            for number in handlers:
                _set(number, hold)
            yield
    finally:
        if len(held) == 1:
            first, frame = held[0]
            handlers[signal.Signals(first)](first, frame)


def _set(number: signal.Signals, handler: Handler) -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(number, handler)


def _unwind(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # the code that a shell shows for a process ended by this signal
