"""How this audit's own statements are made: one that compares, one that only says, and how numbers look in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from k3ray.audit.snapshot import Letter, Statement, View

LISTED = 6


def compared(
    id: str, view: View, kind: Letter, subject: str, found: str, expected: str, source: str, main: bool = False
) -> Statement:
    """A statement that agrees when what was found is what was expected, to the letter."""
    return Statement(id, view, kind, "k3ray", subject, found, expected, found == expected, source, main)


def said(
    id: str, view: View, kind: Letter, subject: str, found: str, source: str, expected: str = "", main: bool = False
) -> Statement:
    """An observation, or a statement with nothing to compare: it decides nothing."""
    return Statement(id, view, kind, "k3ray", subject, found, expected, None, source, main)


def number(value: int | None) -> str:
    """A whole number with commas, or that it is unknown."""
    return "unknown" if value is None else f"{value:,}"


def some(items: Sequence[object]) -> str:
    """The first items and how many more there are."""
    more = f" and {len(items) - LISTED} more" if len(items) > LISTED else ""
    return ", ".join(map(str, items[:LISTED])) + more


def ranges(numbers: Iterable[int]) -> str:
    """Whole numbers as ranges: "0-2, 4-6"."""
    runs: list[list[int]] = []
    for value in sorted(numbers):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in runs) or "none"
