"""Amounts as a person reads them: bytes in decimal units, seconds as minutes, hours and days. Imports nothing heavy."""

from __future__ import annotations


def decimal_size(count: int) -> str:
    """Return a number of bytes in decimal units, with three decimals from a kilobyte on."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:,.3f} {unit}"
    return f"{count} B"


def duration(seconds: float) -> str:
    """Seconds as a person says them: 42 s, 12 min, 3 h 05 min, 2 d 4 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
