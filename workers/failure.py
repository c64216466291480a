"""The base of every failure that a user is told about in one message, with the exit code it ends a command with."""

from __future__ import annotations


class Failure(Exception):
    """Something the user can act on: the message says what was found, what was expected and what to do.

    Exit codes: 1 bind or forward failed, 2 usage or a config not understood, 3 an actor or node was lost for good,
    4 finished but an expert failed to load.
    """

    exit_code = 1
