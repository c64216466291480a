"""Every expert has one owner, whatever the counts, and those who ask and those who answer agree on it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3ray.workers.expert_owners import ExpertGroup, ExpertOwners, NoOwner

EXPERTS = 12


@st.composite
def deals(draw: st.DrawFn) -> tuple[ExpertGroup, ...]:
    """Layers 1 to at most 8 in groups, each with its own counts over the same shards."""
    shards = draw(st.integers(1, 5))
    cuts = sorted(draw(st.sets(st.integers(2, 8), max_size=3)))
    groups = []
    for first, stop in pairwise([1, *cuts, 9]):
        total = (stop - first) * EXPERTS
        ends = sorted(draw(st.lists(st.integers(0, total), min_size=shards - 1, max_size=shards - 1)))
        counts = tuple(high - low for low, high in pairwise([0, *ends, total]))
        groups.append(ExpertGroup(tuple(range(first, stop)), counts))
    return tuple(groups)


@given(deals())
def test_each_expert_is_one_shards_and_the_counts_hold(groups: tuple[ExpertGroup, ...]) -> None:
    shards, layers = len(groups[0].counts), range(1, 9)
    owners = ExpertOwners(shards, EXPERTS, groups)
    held = [owners.held_by(shard, layers, EXPERTS) for shard in range(shards)]
    for group in groups:
        for shard, count in enumerate(group.counts):
            assert sum(int(held[shard][layer].sum()) for layer in group.layers if layer in held[shard]) == count
    for layer in layers:
        asked = owners.of(layer, np.arange(EXPERTS, dtype=np.int32))
        answering = np.array([mine.get(layer, np.zeros(EXPERTS, bool)) for mine in held])
        assert (answering.sum(axis=0) == 1).all()
        assert (answering.argmax(axis=0) == asked).all()


def test_without_counts_they_are_dealt_in_turn() -> None:
    ids = np.array([[0, 5, 11], [3, 4, 7]], np.int32)
    assert ExpertOwners(3).of(1, ids).tolist() == [[0, 2, 2], [0, 1, 1]]
    assert ExpertOwners(5).held_by(4, [2], 9)[2].tolist() == [False] * 4 + [True] + [False] * 4


def test_what_no_shard_has_is_refused() -> None:
    owners = ExpertOwners(2, EXPERTS, [ExpertGroup((1,), (12, 0))])
    assert owners.held_by(1, [1], EXPERTS) == {}
    with pytest.raises(NoOwner, match="layer 2 has routed experts"):
        owners.of(2, np.zeros((1, 2), np.int32))
    with pytest.raises(ValueError, match="over another number of shards than 3"):
        ExpertOwners(3, EXPERTS, [ExpertGroup((1,), (12, 0))])
