"""How long a download waits and how often it tries again: pure, so that a test can be impatient."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime


@dataclass(frozen=True, slots=True)
class Patience:
    """attempts: failures in a row without a byte of progress before a file is given up. Times in seconds.

    first_wait_s doubles up to longest_wait_s, each with jitter. stall_s: silence after which a connection is dropped.
    longest_retry_after_s: the longest wait that a server may ask for. grace_s: how long an interruption waits for its
    threads before it keeps for them what they have received.
    """

    attempts: int = 8
    first_wait_s: float = 1.0
    longest_wait_s: float = 60.0
    stall_s: float = 30.0
    longest_retry_after_s: float = 900.0
    grace_s: float = 2.0

    def wait_s(self, failures: int, retry_after_s: float | None, chance: random.Random) -> float:
        """Seconds to wait after so many failures in a row: what the server asked for, else backoff with jitter."""
        if retry_after_s is not None:
            return min(retry_after_s, self.longest_retry_after_s) + chance.uniform(0, self.first_wait_s)
        longest = min(self.first_wait_s * 2 ** min(failures - 1, 30), self.longest_wait_s)
        return chance.uniform(longest / 2, longest)


def parse_retry_after(text: str | None, now: datetime | None = None) -> float | None:
    """Seconds that a Retry-After header asks for (a number or a date); None where it is absent or not understood."""
    if not text:
        return None
    if text.isascii() and text.isdigit() and len(text) < 9:
        return float(text)
    try:
        date = parsedate_to_datetime(text)
    except ValueError:
        return None
    date = date if date.tzinfo else date.replace(tzinfo=UTC)
    return max((date - (now or datetime.now(UTC))).total_seconds(), 0.0)
