"""How many bytes of messages went from which actor to which: counted where they are made and read, not on any link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

DRIVER, NEXT = "driver", "next stage"
ARROW = " > "


@dataclass(slots=True)
class Traffic:
    """Sums of one sender with one receiver: requests and replies, or frames in and answers out.

    positions: of the frames, over all sequences. far_sent_bytes, far_received_bytes: of the bytes, those that went to
    another node or came from there, by where the other end was then.
    """

    sent: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    positions: int = 0
    far_sent_bytes: int = 0
    far_received_bytes: int = 0
    _far_out: bool = False
    _far_in: bool = False
    _generation: int = 0

    def send(self, nbytes: int) -> None:
        """Count a message that goes out."""
        self.sent += 1
        self.sent_bytes += nbytes
        self.far_sent_bytes += nbytes if self._far_out else 0

    def receive(self, nbytes: int) -> None:
        """Count a message that came in."""
        self.received_bytes += nbytes
        self.far_received_bytes += nbytes if self._far_in else 0

    def place(self, far_out: bool, far_in: bool | None = None, generation: int = 0) -> None:
        """From now on what goes out goes to another node, or not; what comes in likewise (None: as before).

        generation: of the other end's process; what is told of an older one than before changes nothing.
        """
        if generation >= self._generation:
            self._far_out, self._generation = far_out, generation
            self._far_in = self._far_in if far_in is None else far_in


@dataclass(frozen=True, slots=True)
class FarEnds:
    """Which of those that a stage exchanges messages with are on other nodes than the stage."""

    driver: bool = False
    following: bool = False
    shards: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class MessageCounts:
    """Bytes by way, "sender > receiver"; actors by what they hold. positions: that the first stage has applied.

    between_bytes: of all bytes, those that went from node to node.
    """

    way_bytes: Mapping[str, int] = field(default_factory=dict)
    positions: int = 0
    between_bytes: int = 0

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
        between = frames.far_sent_bytes + (frames.far_received_bytes if first else 0)
        between += sum(traffic.far_sent_bytes + traffic.far_received_bytes for traffic in shards)
        return cls({way: nbytes for way, nbytes in ways.items() if nbytes}, frames.positions if first else 0, between)

    @property
    def total_bytes(self) -> int:
        """All of them."""
        return sum(self.way_bytes.values())

    def __add__(self, other: MessageCounts) -> MessageCounts:
        ways = [*self.way_bytes, *(way for way in other.way_bytes if way not in self.way_bytes)]
        both = {way: self.way_bytes.get(way, 0) + other.way_bytes.get(way, 0) for way in ways}
        return MessageCounts(both, self.positions + other.positions, self.between_bytes + other.between_bytes)

    def __sub__(self, other: MessageCounts) -> MessageCounts:
        less = {way: nbytes - other.way_bytes.get(way, 0) for way, nbytes in self.way_bytes.items()}
        ways = {way: nbytes for way, nbytes in less.items() if nbytes}
        return MessageCounts(ways, self.positions - other.positions, self.between_bytes - other.between_bytes)
