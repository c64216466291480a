"""The base of every failure that a user is told about in one message, with the exit code it ends a command with."""

from __future__ import annotations

from typing import Any


class Failure(Exception):
    """Something the user can act on: the message says what was found, what was expected and what to do.

    Exit codes: 1 bind or forward failed, 2 usage or a config not understood, 3 an actor or node was lost for good,
    4 finished but an expert failed to load. A subclass may take any arguments: it still travels between processes.
    """

    exit_code = 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by message and attributes, never by the constructor's arguments."""
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(kind: type[Failure], arguments: tuple[Any, ...], attributes: dict[str, Any]) -> Failure:
    failure = kind.__new__(kind)
    Exception.__init__(failure, *arguments)
    failure.__dict__.update(attributes)
    return failure
