"""How many bytes of messages went from which actor to which: counted where they are made and read, not on any link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

DRIVER, NEXT = "driver", "next stage"
ARROW = " > "


@dataclass(slots=True)
class Traffic:
    """Sums of one sender with one receiver: requests and replies, or frames in and answers out.

    positions: of the frames, over all sequences.
    """

    sent: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    positions: int = 0


@dataclass(frozen=True, slots=True)
class MessageCounts:
    """Bytes by way, "sender > receiver"; actors by what they hold. positions: that the first stage has applied."""

    way_bytes: Mapping[str, int] = field(default_factory=dict)
    positions: int = 0

    @classmethod
    def of_stage(cls, name: str, first: bool, last: bool, frames: Traffic, shards: Sequence[Traffic]) -> MessageCounts:
        """Of a stage: what it gave on, what it exchanged with every shard, and, of the first one, what the driver sent.

        What the stage before it sent is that one's to count.
        """
        ways = {f"{DRIVER}{ARROW}{name}": frames.received_bytes} if first else {}
        ways[f"{name}{ARROW}{DRIVER if last else NEXT}"] = frames.sent_bytes
        for number, traffic in enumerate(shards):
            shard = f"shard {number} of {len(shards)}"
            ways |= {f"{name}{ARROW}{shard}": traffic.sent_bytes, f"{shard}{ARROW}{name}": traffic.received_bytes}
        return cls({way: nbytes for way, nbytes in ways.items() if nbytes}, frames.positions if first else 0)

    @property
    def total_bytes(self) -> int:
        """All of them."""
        return sum(self.way_bytes.values())

    def __add__(self, other: MessageCounts) -> MessageCounts:
        ways = [*self.way_bytes, *(way for way in other.way_bytes if way not in self.way_bytes)]
        both = {way: self.way_bytes.get(way, 0) + other.way_bytes.get(way, 0) for way in ways}
        return MessageCounts(both, self.positions + other.positions)

    def __sub__(self, other: MessageCounts) -> MessageCounts:
        less = {way: nbytes - other.way_bytes.get(way, 0) for way, nbytes in self.way_bytes.items()}
        return MessageCounts({way: nbytes for way, nbytes in less.items() if nbytes}, self.positions - other.positions)
