"""What a user asks of memory: sizes as text, and flags in the order they were given made into one record."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from decimal import Decimal

from k3ray.cluster.presets import PRESETS
from k3ray.workers.failure import Failure

AUTO = "auto"
MAX_BYTES = 1 << 62
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s?([KMGT]I?)?B?", re.IGNORECASE | re.ASCII)
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}


class SizeFailure(Failure):
    """A size or a preset that is not understood."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Wishes:
    """What was asked for; nothing of it: everything resident where that fits, else auto.

    total_bytes: of --memory. preset: of --preset; at most one of the two is set. trunk_bytes: to pin, of --trunk-gb;
    cache_bytes: of all expert slots, of --cache-gb; None: as much as the total leaves, trunk first.
    """

    total_bytes: int | None = None
    preset: str | None = None
    trunk_bytes: int | None = None
    cache_bytes: int | None = None

    @property
    def said(self) -> str:
        """The wishes in words, for messages."""
        words = {
            "--memory": None if self.total_bytes is None else f"{self.total_bytes:,} bytes",
            "--preset": self.preset,
            "--trunk-gb": None if self.trunk_bytes is None else f"{self.trunk_bytes / 1e9:g}",
            "--cache-gb": None if self.cache_bytes is None else f"{self.cache_bytes / 1e9:g}",
        }
        return " ".join(f"{flag} {value}" for flag, value in words.items() if value is not None) or "no wishes"


def merge_wishes(flags: Iterable[tuple[str, str]]) -> Wishes:
    """Read (flag, value) pairs in the order given: later ones win over earlier ones.

    --memory and --preset say the total and undo everything before them; --trunk-gb and --cache-gb divide it. Raises
    SizeFailure.
    """
    wishes = Wishes()
    for flag, value in flags:
        if flag == "--memory":
            wishes = Wishes(total_bytes=parse_size(value, flag))
        elif flag == "--preset":
            if value not in PRESETS:
                raise SizeFailure(f"--preset: found {value!r}, expected one of {', '.join(PRESETS)}")
            wishes = Wishes(preset=value)
        elif flag == "--trunk-gb":
            wishes = replace(wishes, trunk_bytes=None if value == AUTO else _gigabytes(value, flag, " or auto"))
        elif flag == "--cache-gb":
            wishes = replace(wishes, cache_bytes=_gigabytes(value, flag, ""))
        else:
            raise ValueError(f"{flag} is no flag of the memory budget")
    return wishes


def parse_size(text: str, flag: str) -> int:
    """Bytes of a size like 24G, 24GB, 500M, 1.5G (powers of 1000) or 24GiB, 512MiB (powers of 1024), at least 1.

    Raises SizeFailure, also for a number without a unit.
    """
    match = _SIZE.fullmatch(text)
    unit = (match[2] or "").upper() if match else ""
    if match is None or not unit:
        raise SizeFailure(
            f"{flag}: found {text!r}, expected a size with its unit: 24G, 24GB, 500M or 1.5T count in thousands, "
            "24GiB or 512MiB in 1024s"
        )
    nbytes = int(Decimal(match[1]) * (1024 if unit.endswith("I") else 1000) ** _POWERS[unit[0]])
    if not 1 <= nbytes <= MAX_BYTES:
        raise SizeFailure(f"{flag}: found {text!r}, which is {nbytes} bytes, expected at least one and below 2^62")
    return nbytes


def _gigabytes(text: str, flag: str, also: str) -> int:
    """Bytes of a number of decimal gigabytes; zero is one."""
    match = _SIZE.fullmatch(text)
    if match is None or not text[-1:].isdigit():
        raise SizeFailure(f"{flag}: found {text!r}, expected a number of gigabytes (of 10^9 bytes) like 6 or 1.5{also}")
    return int(Decimal(match[1]) * 10**9)
