"""What a part of the tape takes in memory, by how many of its chunks stay: every byte once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3ray.workers.model.config import read_config
from k3ray.workers.tape.layout import TapeLayout, plan_layout
from k3ray.workers.tape.order import KV_B
from k3ray.workers.tape.residency import fixed_residency, pinning_order


@pytest.fixture(scope="module")
def layout(k3b_dir: Path) -> TapeLayout:
    return plan_layout(read_config(k3b_dir), 32 << 10)


def copied(layout: TapeLayout, chunks: Sequence[int], pinned: int) -> int:
    """The largest matrix needed in one piece of which some piece is streamed, or lies apart from the one before it."""
    pieces: dict[int, list[tuple[int, int, bool]]] = {}  # tensor -> (begin, end on the tape, whether it stays)
    stay = set(pinning_order(len(chunks))[:pinned])
    for place, number in enumerate(chunks):
        chunk = layout.chunks[number]
        for segment in chunk.segments:
            begin, tensor = chunk.offset + segment.offset, layout.tensors[segment.tensor]
            if tensor.short != KV_B:
                continue
            end = begin + segment.rows * tensor.row_bytes
            pieces.setdefault(segment.tensor, []).append((begin, end, place in stay))
    apart = [
        layout.tensors[number].nbytes
        for number, parts in pieces.items()
        if not all(stays for *_, stays in parts) or any(one[1] != next_one[0] for one, next_one in pairwise(parts))
    ]
    return max(apart, default=0)


@given(pages=st.sampled_from([1, 2, 3, 8]), ring=st.integers(1, 300), first=st.integers(0, 8), data=st.data())
def test_every_byte_is_pinned_or_streamed(
    k3b_dir: Path, pages: int, ring: int, first: int, data: st.DataObject
) -> None:
    layout = plan_layout(read_config(k3b_dir), pages << 12)
    chunks = layout.chunks_of(first, data.draw(st.integers(first + 1, 9)), False)
    pinned = data.draw(st.integers(0, len(chunks)))
    found = fixed_residency(layout, chunks, pinned, ring)
    total = sum(layout.chunks[number].nbytes for number in chunks)
    assert found.pinned_bytes + found.streamed_bytes == total
    assert found.ring_chunks == min(ring, len(chunks) - pinned)
    assert found.ring_bytes == found.ring_chunks * layout.chunk_bytes
    assert found.whole_bytes == copied(layout, chunks, pinned)


def test_the_order_of_pinning_halves_what_is_between() -> None:
    assert pinning_order(8) == (0, 4, 2, 6, 1, 5, 3, 7)
    assert pinning_order(5) == (0, 4, 2, 1, 3)
    assert (pinning_order(1), pinning_order(0)) == ((0,), ())


@given(num_chunks=st.integers(1, 3000), pinned=st.integers(1, 3000))
def test_what_is_pinned_lies_evenly_on_the_tape(num_chunks: int, pinned: int) -> None:
    order = pinning_order(num_chunks)
    assert sorted(order) == list(range(num_chunks))
    pinned = min(pinned, num_chunks)
    borders = [-1, *sorted(order[:pinned]), num_chunks]
    longest = max(after - before - 1 for before, after in pairwise(borders))
    assert longest < 2 * 2 * num_chunks / pinned  # streamed in a row; evenly would be num_chunks / pinned - 1


def test_a_residency_says_which_places_stay(layout: TapeLayout) -> None:
    chunks = layout.chunks_of(2, 5, True)
    found = fixed_residency(layout, chunks, 3, 2)
    assert found.pinned_places == tuple(sorted(pinning_order(len(chunks))[:3]))
    assert found.pinned_bytes == sum(layout.chunks[chunks[place]].nbytes for place in found.pinned_places)


def test_a_part_that_is_all_pinned_takes_its_own_bytes(layout: TapeLayout) -> None:
    found = fixed_residency(layout, range(len(layout.chunks)), len(layout.chunks), 8)
    assert (found.pinned_bytes, found.memory_bytes, found.streamed_bytes) == (layout.total_bytes,) * 2 + (0,)


def test_memory_for_a_whole_matrix_is_planned_where_one_is_streamed(layout: TapeLayout) -> None:
    kv_b = next(tensor for tensor in layout.tensors if tensor.short == KV_B)
    assert fixed_residency(layout, layout.chunks_of(3, 4, False), 0, 1).whole_bytes == kv_b.nbytes
    assert fixed_residency(layout, layout.chunks_of(0, 3, True), 0, 1).whole_bytes == 0


def test_a_matrix_in_padded_pieces_is_copied_even_when_it_is_pinned(k3b_dir: Path) -> None:
    odd = plan_layout(replace(read_config(k3b_dir), kv_lora_rank=41), 4 << 10)
    chunks = odd.chunks_of(3, 4, False)
    kv_b = next(tensor for tensor in odd.tensors if tensor.short == KV_B)
    assert kv_b.nbytes > 4 << 10
    assert fixed_residency(odd, chunks, len(chunks), 0).whole_bytes == kv_b.nbytes


def test_streaming_without_a_ring_is_our_own_mistake(layout: TapeLayout) -> None:
    with pytest.raises(ValueError, match="at least one buffer"):
        fixed_residency(layout, range(5), 4, 0)
