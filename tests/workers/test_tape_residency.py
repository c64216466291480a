"""How a budget is divided: never more than it, never less pinned than fits, refused with the numbers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3ray.workers.model.config import read_config
from k3ray.workers.tape.layout import TapeLayout, plan_layout
from k3ray.workers.tape.order import KV_B
from k3ray.workers.tape.residency import ResidencyFailure, fixed_residency, pinning_order, plan_residency


@pytest.fixture(scope="module")
def layout(k3b_dir: Path) -> TapeLayout:
    return plan_layout(read_config(k3b_dir), 32 << 10)


@given(budget=st.integers(0, 6_000_000), ring=st.integers(1, 300), first=st.integers(0, 8), count=st.integers(1, 9))
def test_a_budget_is_kept_and_used(layout: TapeLayout, budget: int, ring: int, first: int, count: int) -> None:
    chunks = layout.chunks_of(first, min(first + count, 9), first + count >= 9)
    total = sum(layout.chunks[number].nbytes for number in chunks)
    try:
        found = plan_residency(layout, chunks, budget, ring)
    except ResidencyFailure as failure:
        smallest = fixed_residency(layout, chunks, 0, 1)
        assert budget < min(total, smallest.memory_bytes)
        assert f"at least {smallest.memory_bytes / 1e6:,.1f} MB" in str(failure)
        return
    assert found.memory_bytes <= budget
    assert found.pinned_bytes + found.streamed_bytes == total
    assert found.ring_chunks <= ring
    if found.streamed_bytes:
        assert found.ring_chunks >= 1
        assert total > budget
        next_chunk = layout.chunks[chunks[pinning_order(len(chunks))[found.pinned]]]
        whole_before = fixed_residency(layout, chunks, 0, 1).whole_bytes
        assert found.pinned_bytes + found.ring_bytes + whole_before + next_chunk.nbytes > budget or (
            found.ring_chunks < min(ring, len(chunks))
        )
    else:
        assert found.ring_bytes == found.whole_bytes == 0


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


def test_no_budget_means_all_in_memory(layout: TapeLayout) -> None:
    found = plan_residency(layout, range(len(layout.chunks)), None)
    assert (found.pinned_bytes, found.memory_bytes, found.streamed_bytes) == (layout.total_bytes,) * 2 + (0,)


def test_a_ring_shrinks_before_a_budget_is_refused(layout: TapeLayout) -> None:
    chunks = range(len(layout.chunks))
    least = fixed_residency(layout, chunks, 0, 1).memory_bytes
    assert plan_residency(layout, chunks, least, 8).ring_chunks == 1
    assert plan_residency(layout, chunks, least + layout.chunk_bytes, 8).ring_chunks == 2
    one = least + layout.chunks[0].nbytes
    assert [plan_residency(layout, chunks, budget, 1).pinned for budget in (one - 1, one)] == [0, 1]
    with pytest.raises(ResidencyFailure) as caught:
        plan_residency(layout, chunks, least - 1, 8)
    assert caught.value.exit_code == 2


def test_memory_for_a_whole_matrix_is_planned_where_one_is_streamed(layout: TapeLayout) -> None:
    kv_b = next(tensor for tensor in layout.tensors if tensor.short == KV_B)
    assert fixed_residency(layout, layout.chunks_of(3, 4, False), 0, 1).whole_bytes == kv_b.nbytes
    assert fixed_residency(layout, layout.chunks_of(0, 3, True), 0, 1).whole_bytes == 0


def test_a_matrix_in_padded_pieces_is_copied_even_when_it_is_pinned(k3b_dir: Path) -> None:
    odd = plan_layout(replace(read_config(k3b_dir), kv_lora_rank=41), 4 << 10)
    chunks = odd.chunks_of(3, 4, False)
    kv_b = next(tensor for tensor in odd.tensors if tensor.short == KV_B)
    total = sum(odd.chunks[number].nbytes for number in chunks)
    assert kv_b.nbytes > 4 << 10
    assert fixed_residency(odd, chunks, len(chunks), 0).whole_bytes == kv_b.nbytes
    assert plan_residency(odd, chunks, None).whole_bytes == kv_b.nbytes
    for budget in range(total - 9000, total + kv_b.nbytes + 9000, 1000):
        found = plan_residency(odd, chunks, budget)
        assert found.memory_bytes <= budget
        assert (found.streamed_bytes == 0) == (budget >= total + kv_b.nbytes)


def test_streaming_without_a_ring_is_our_own_mistake(layout: TapeLayout) -> None:
    with pytest.raises(ValueError, match="at least one buffer"):
        fixed_residency(layout, range(5), 4, 0)
