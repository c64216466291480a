"""How much of a stage's tape stays in memory for how many bytes: arithmetic alone, done before anything is mapped.

In order: one buffer to stream through, the memory for matrices that are needed in one piece, then the rest of the ring,
then as many pinned chunks as fit. When everything is pinned there is no ring.

Pinned chunks are spread over the tape. A pinned beginning would be used up in one go, with the disk at rest behind a
full ring, and the arithmetic would wait for the disk afterwards: the two times would add up instead of overlapping.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from k3ray.workers.failure import Failure
from k3ray.workers.tape.layout import TapeLayout
from k3ray.workers.tape.order import KV_B

DEFAULT_RING_CHUNKS = 4


class ResidencyFailure(Failure):
    """A budget in which not even one buffer of the ring finds room."""

    exit_code = 2


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


def plan_residency(
    layout: TapeLayout, chunks: Sequence[int], budget_bytes: int | None, ring_chunks: int = DEFAULT_RING_CHUNKS
) -> Residency:
    """Divide a budget (None: all in memory); raises ResidencyFailure with the numbers when nothing can be done."""
    resident = fixed_residency(layout, chunks, len(chunks), 0)
    if budget_bytes is None or resident.memory_bytes <= budget_bytes:
        return resident
    for ring in range(min(ring_chunks, len(chunks)), 0, -1):
        planned = fixed_residency(layout, chunks, 0, ring)
        if planned.memory_bytes <= budget_bytes:
            break
    else:
        raise ResidencyFailure(
            f"{budget_bytes / 1e6:,.1f} MB for this part of the trunk: expected at least "
            f"{planned.memory_bytes / 1e6:,.1f} MB, one chunk of {layout.chunk_bytes / 1e6:,.1f} MB and "
            f"{planned.whole_bytes / 1e6:,.1f} MB for a matrix that is needed in one piece; give it more"
        )
    order = pinning_order(len(chunks))
    pinned, left = 0, budget_bytes - planned.memory_bytes
    while (nbytes := layout.chunks[chunks[order[pinned]]].nbytes) <= left:
        pinned += 1
        left -= nbytes
    return fixed_residency(layout, chunks, pinned, ring)


def fixed_residency(layout: TapeLayout, chunks: Sequence[int], pinned: int, ring_chunks: int) -> Residency:
    """So many chunks in memory, in pinning_order, and the others through a ring of so many buffers."""
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
        whole_bytes=_largest_copy(layout, chunks, frozenset(order[:pinned])),
        streamed_bytes=streamed_bytes,
    )


def _largest_copy(layout: TapeLayout, chunks: Sequence[int], pinned: frozenset[int]) -> int:
    """Bytes of the largest matrix that is needed in one piece and is not in memory in one."""
    largest = 0
    ends: dict[int, int] = {}  # of the rows so far on the tape, by tensor
    for place, number in enumerate(chunks):
        chunk = layout.chunks[number]
        for segment in chunk.segments:
            tensor = layout.tensors[segment.tensor]
            if tensor.short == KV_B:
                begin = chunk.offset + segment.offset
                if place not in pinned or ends.get(segment.tensor, begin) != begin:
                    largest = max(largest, tensor.nbytes)
                ends[segment.tensor] = begin + segment.rows * tensor.row_bytes
    return largest
