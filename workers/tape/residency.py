"""How many bytes a stage's part of the tape takes, by how much of it stays: arithmetic alone, nothing is mapped.

How much is to stay is decided over all stages at once (k3ray/cluster). When everything is pinned there is no ring.

Pinned chunks are spread over the tape. A pinned beginning would be used up in one go, with the disk at rest behind a
full ring, and the arithmetic would wait for the disk afterwards: the two times would add up instead of overlapping.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from k3ray.workers.tape.layout import TapeLayout
from k3ray.workers.tape.order import KV_B

DEFAULT_RING_CHUNKS = 4


@dataclass(frozen=True, slots=True)
class Residency:
    """One stage's part of the tape.

    chunks: their numbers in the order of use; those at the first `pinned` places of pinning_order stay in memory, the
    others pass through ring_chunks buffers once a step. whole_bytes: for a streamed matrix that is needed in one piece.
    """

    chunks: tuple[int, ...]
    pinned: int
    ring_chunks: int
    pinned_bytes: int
    ring_bytes: int
    whole_bytes: int
    streamed_bytes: int  # a step

    @property
    def pinned_places(self) -> tuple[int, ...]:
        """The places in `chunks` of those that stay in memory, ascending."""
        return tuple(sorted(pinning_order(len(self.chunks))[: self.pinned]))

    @property
    def memory_bytes(self) -> int:
        """Everything that is mapped for it."""
        return self.pinned_bytes + self.ring_bytes + self.whole_bytes


def pinning_order(num_chunks: int) -> tuple[int, ...]:
    """The places of a stage's chunks in the order in which they are pinned: any first part lies evenly on the tape.

    It is the order of the places' bits read backwards: first every second one, then every second one between.
    """
    bits = max(1, (num_chunks - 1).bit_length())
    return tuple(sorted(range(num_chunks), key=lambda place: int(f"{place:0{bits}b}"[::-1], 2)))


def fixed_residency(layout: TapeLayout, chunks: Sequence[int], pinned: int, ring_chunks: int) -> Residency:
    """So many chunks in memory, all of them where there are fewer, in pinning_order; the others through such a ring."""
    pinned = min(pinned, len(chunks))
    order = pinning_order(len(chunks))
    pinned_bytes, streamed_bytes = (
        sum(layout.chunks[chunks[place]].nbytes for place in places) for places in (order[:pinned], order[pinned:])
    )
    streamed = len(chunks) - pinned
    if streamed and ring_chunks < 1:
        raise ValueError(f"{streamed} chunks are streamed: expected a ring of at least one buffer")
    return Residency(
        chunks=tuple(chunks),
        pinned=pinned,
        ring_chunks=min(ring_chunks, streamed),
        pinned_bytes=pinned_bytes,
        ring_bytes=min(ring_chunks, streamed) * layout.chunk_bytes,
        whole_bytes=copy_bytes(layout, chunks)[pinned],
        streamed_bytes=streamed_bytes,
    )


def copy_bytes(layout: TapeLayout, chunks: Sequence[int]) -> list[int]:
    """(chunks + 1,) bytes of the largest matrix that has to be copied into one piece, by how many chunks are pinned.

    One that is needed in one piece and is not all pinned, or lies on the tape with something between its pieces.
    """
    needed = [0] * (len(chunks) + 1)
    ends: dict[int, int] = {}  # of the rows so far on the tape, by tensor
    before = {place: count for count, place in enumerate(pinning_order(len(chunks)))}  # pinned before it
    for place, number in enumerate(chunks):
        chunk = layout.chunks[number]
        for segment in chunk.segments:
            tensor = layout.tensors[segment.tensor]
            if tensor.short == KV_B:
                begin = chunk.offset + segment.offset
                last = before[place] if ends.get(segment.tensor, begin) == begin else len(chunks)
                needed[last] = max(needed[last], tensor.nbytes)
                ends[segment.tensor] = begin + segment.rows * tensor.row_bytes
    return list(accumulate(reversed(needed), max))[::-1]
