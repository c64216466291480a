"""Whole numbers that a caller of the API gives: 3.5 is no 3, True is no 1, and a count is not negative."""

from __future__ import annotations

import operator

from k3ray.workers.failure import Failure


class NotWhole(Failure):
    """A number that is not a whole one, or too small."""

    exit_code = 2


def whole_number(name: str, value: object, low: int | None = None) -> int:
    """Return the value as an int: of Python's or numpy's whole types, at least low; NotWhole names it otherwise."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # whatever has no index is what is refused here
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or type(value).__name__ == "bool":
        raise NotWhole(f"{name}: found {value!r}, expected a whole number")
    if low is not None and number < low:
        raise NotWhole(f"{name}: found {number}, expected {low} or more")
    return number
