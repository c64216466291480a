"""A number of things, as a sentence says it."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """1 stage, 2 stages, 0 processes, 12,288 tensors."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{ending}"
