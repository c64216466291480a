"""The one formula of a token's seconds: stages take turns, and in each the disk works while the cores do.

A stage's turn takes as long as the longer of two: its arithmetic with the experts that it waits for, layer by layer;
and what its disk reads meanwhile, trunk and experts together. Its ring fills while others have their turn: that is
read ahead. Knows neither seats nor models: prediction.py (many hosts) and forecast.py (one) bring the seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """One stage. kernels_s: its trunk and states from memory, without what goes on while shards work.

    experts_s: the routed experts and what goes on meanwhile, as long as the stage stands for them; experts_wait:
    whether their disk decides that. trunk_read_s, experts_read_s: what the disks need in its turn for the one and the
    other. ahead_s: the most of trunk_read_s that the ring holds. disk: where that is read; turns with one disk share
    it.
    """

    kernels_s: float
    experts_s: float = 0.0
    experts_wait: bool = False
    trunk_read_s: float = 0.0
    experts_read_s: float = 0.0
    ahead_s: float = 0.0
    disk: int = 0

    def seconds(self, ahead_s: float = 0.0) -> float:
        """Of the turn, with so much of the trunk read ahead."""
        return max(self.kernels_s + self.experts_s, self.trunk_read_s - ahead_s + self.experts_read_s)


@dataclass(frozen=True, slots=True)
class TokenTime:
    """Seconds by what they are spent on; between stages is not in it."""

    disk_s: float
    kernels_s: float


def token_time(turns: Sequence[Turn], between_s: float) -> TokenTime:
    """Add up the turns of a token. between_s: what passes between them, and between two tokens.

    A ring is filled before its stage's turn, as long as all that a disk has to read in a token finds its time.
    """
    disk_s = kernels_s = 0.0
    reading: defaultdict[int, float] = defaultdict(float)
    for turn in turns:
        reading[turn.disk] += turn.trunk_read_s + turn.experts_read_s
        taken_s = turn.seconds(min(turn.ahead_s, turn.trunk_read_s))
        rest_s = taken_s - turn.experts_s if taken_s > turn.experts_s else 0.0
        waited_s = taken_s > turn.kernels_s + turn.experts_s
        experts_s = taken_s - rest_s
        disk_s += (rest_s if waited_s else 0.0) + (experts_s if turn.experts_wait else 0.0)
        kernels_s += (0.0 if waited_s else rest_s) + (0.0 if turn.experts_wait else experts_s)
    never_less_s = max(reading.values(), default=0.0) - between_s
    return TokenTime(disk_s + max(0.0, never_less_s - disk_s - kernels_s), kernels_s)
