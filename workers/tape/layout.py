"""Where every row of the trunk lies on the tape: chunks of whole rows, each on a page and none across a layer's border.

A pure function of the config and the largest chunk. Chunks follow one another without a gap, each as long as its rows
make it, rounded up to a page. A matrix is cut only where its rows end on a page, so that it lies on the tape in one
piece; only where no run of rows that fits a chunk ends on a page (odd widths) is its every piece padded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from k3ray.workers.failure import Failure
from k3ray.workers.model.config import ModelConfig
from k3ray.workers.tape.direct_io import PAGE_BYTES
from k3ray.workers.tape.order import TapeTensor, tape_tensors

DEFAULT_CHUNK_BYTES = 8 << 20


class ChunkSizeFailure(Failure):
    """A chunk size in which the rows of this model do not fit, or that is no whole number of pages."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows first_row..first_row+rows of a tensor (its number on the tape), at `offset` bytes in their chunk."""

    tensor: int
    first_row: int
    rows: int
    offset: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """What is read at once: nbytes at `offset` of the tape, both whole pages, of one layer."""

    layer: int
    offset: int
    nbytes: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class TapeLayout:
    """The tape of one model. chunk_bytes: the largest a chunk may be, and what a buffer of the ring holds."""

    chunk_bytes: int
    tensors: tuple[TapeTensor, ...]
    chunks: tuple[Chunk, ...]

    @property
    def head_layer(self) -> int:
        """The number under which the head lies on the tape: one past the last layer."""
        return self.tensors[-1].layer

    @property
    def total_bytes(self) -> int:
        """Bytes of the tape."""
        return self.chunks[-1].offset + self.chunks[-1].nbytes

    @property
    def padding_bytes(self) -> int:
        """Bytes of the tape that belong to no tensor."""
        return self.total_bytes - sum(tensor.nbytes for tensor in self.tensors)

    def chunks_of(self, first: int, stop: int, head: bool) -> tuple[int, ...]:
        """Numbers of the chunks of the layers first..stop-1, and with `head` those of the head after them."""
        wanted = {*range(first, stop), *([self.head_layer] if head else [])}
        return tuple(number for number, chunk in enumerate(self.chunks) if chunk.layer in wanted)


def plan_layout(config: ModelConfig, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> TapeLayout:
    """Lay the model out; raises ChunkSizeFailure when a row does not fit in a chunk."""
    tensors = tape_tensors(config)
    widest = max(tensors, key=lambda tensor: tensor.row_bytes)
    if chunk_bytes % PAGE_BYTES or not widest.row_bytes <= chunk_bytes <= 1 << 30:
        raise ChunkSizeFailure(
            f"a tape in chunks of {chunk_bytes} bytes: expected a multiple of {PAGE_BYTES} from "
            f"{_whole_pages(widest.row_bytes)}, one row of layer {widest.layer}'s {widest.short}, to {1 << 30}"
        )
    writer = _ChunkCutter(chunk_bytes)
    for number, tensor in enumerate(tensors):
        writer.add(number, tensor)
    writer.close_chunk()
    return TapeLayout(chunk_bytes, tensors, tuple(writer.chunks))


class _ChunkCutter:
    """Lays tensors one after the other and closes a chunk when it is full or a layer ends."""

    def __init__(self, chunk_bytes: int) -> None:
        self.chunks: list[Chunk] = []
        self._chunk_bytes = chunk_bytes
        self._offset = 0  # of the open chunk on the tape
        self._used = 0  # bytes of the open chunk, whole pages
        self._segments: list[Segment] = []
        self._layer = 0

    def add(self, number: int, tensor: TapeTensor) -> None:
        """Lay one tensor down, in as many chunks as it needs."""
        if tensor.layer != self._layer:
            self.close_chunk()
            self._layer = tensor.layer
        row = 0
        while row < tensor.rows:
            rows = self._fitting(tensor, tensor.rows - row)
            if rows == 0:
                self.close_chunk()
                continue
            self._segments.append(Segment(number, row, rows, self._used))
            self._used += _whole_pages(rows * tensor.row_bytes)
            row += rows

    def close_chunk(self) -> None:
        """End the open chunk; an empty one is none."""
        if self._segments:
            self.chunks.append(Chunk(self._layer, self._offset, self._used, tuple(self._segments)))
        self._offset += self._used
        self._used = 0
        self._segments = []

    def _fitting(self, tensor: TapeTensor, remaining: int) -> int:
        """How many of the remaining rows go into the open chunk; 0 when it has to be closed first."""
        fitting = (self._chunk_bytes - self._used) // tensor.row_bytes
        if fitting >= remaining:
            return remaining
        rows_to_a_page = math.lcm(tensor.row_bytes, PAGE_BYTES) // tensor.row_bytes
        if fitting >= rows_to_a_page:
            return fitting - fitting % rows_to_a_page
        return 0 if self._used else fitting


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
