"""A chunk of the tape as the shards say it must be: their rows in their places, zeros between."""

from __future__ import annotations

from collections.abc import Iterator

from k3ray.workers.checkpoint.binding import Binding
from k3ray.workers.checkpoint.tensors import ARRAY_DTYPES, TensorReader
from k3ray.workers.tape.direct_io import Bytes
from k3ray.workers.tape.layout import Segment, TapeLayout
from k3ray.workers.tape.order import full_name


def read_from_shards(binding: Binding, reader: TensorReader, layout: TapeLayout, number: int, slot: Bytes) -> Bytes:
    """Fill the slot with a chunk and return the view of it; raises TensorReadError."""
    chunk = layout.chunks[number]
    end = 0
    for segment, view in segment_views(layout, number, slot):
        tensor = layout.tensors[segment.tensor]
        slot[end : segment.offset] = 0
        rows = view.view(ARRAY_DTYPES[tensor.dtype])
        reader.read_rows(full_name(binding, tensor), segment.first_row, segment.first_row + segment.rows, out=rows)
        end = segment.offset + view.nbytes
    slot[end : chunk.nbytes] = 0
    return slot[: chunk.nbytes]


def segment_views(layout: TapeLayout, number: int, slot: Bytes) -> Iterator[tuple[Segment, Bytes]]:
    """Each segment of a chunk with its bytes in a slot that holds the chunk."""
    for segment in layout.chunks[number].segments:
        nbytes = segment.rows * layout.tensors[segment.tensor].row_bytes
        yield segment, slot[segment.offset : segment.offset + nbytes]
