"""A Failure as plain text on a hop: its class by name, its message, attributes and exit code; never a pickle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from k3ray.workers.failure import Failure

Scalar = str | int | float | bool | None
SCALARS = (str, int, float, bool, type(None))


class ShardFailure(Failure):
    """A failure in another process, of a class that is not known in this one, or no Failure at all."""


def encode_failure(error: BaseException) -> pa.Buffer:
    """Return the failure as JSON; what is no Failure travels as a ShardFailure with its class's name in the message."""
    if isinstance(error, Failure):
        record = {
            "class": _name(type(error)),
            "message": str(error),
            "exit_code": error.exit_code,
            "attributes": {name: _plain(value) for name, value in vars(error).items() if not name.startswith("__")},
        }
    else:
        text = f"an expert shard failed in a way that was not foreseen: {type(error).__name__}: {error}"
        record = {"class": _name(ShardFailure), "message": text, "exit_code": ShardFailure.exit_code, "attributes": {}}
    return pa.py_buffer(json.dumps(record).encode())


def decode_failure(message: pa.Buffer) -> Failure:
    """Return the failure as one of its own class where this process has it: nothing is imported for it."""
    try:
        record = json.loads(message.to_pybytes())
        name, text, code = str(record["class"]), str(record["message"]), int(record["exit_code"])
        attributes = dict(record["attributes"])
    except (ValueError, KeyError, TypeError) as error:
        return ShardFailure(f"an expert shard failed and its message cannot be read ({error}): mixed versions?")
    kind = next((found for found in _known(Failure) if _name(found) == name), ShardFailure)
    failure = kind.__new__(kind)
    Exception.__init__(failure, text)
    vars(failure).update(attributes)
    if failure.exit_code != code:
        vars(failure)["exit_code"] = code
    return failure


def _known(kind: type[Failure]) -> Iterator[type[Failure]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _known(below)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _plain(value: Any) -> Scalar | list[Any]:
    """An attribute as JSON has it: a path, say, becomes its text."""
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if isinstance(value, SCALARS) else str(value)
