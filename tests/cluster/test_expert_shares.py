"""Experts dealt out: evenly in every layer, each once; and how long the slowest of the shards takes."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3ray.cluster.expert_shares import share_whole
from k3ray.cluster.slowest_shard import expected_longest
from k3ray.workers.expert_owners import ExpertGroup, deal_experts


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any), st.integers(1, 12))
def test_the_deal_is_even_in_every_layer(weights: list[int], layers: int) -> None:
    counts = share_whole(layers * 16, weights)
    assert sum(counts) == layers * 16
    owners = deal_experts(ExpertGroup(tuple(range(layers)), tuple(counts)), 16)
    for shard, count in enumerate(counts):
        a_layer = (owners == shard).sum(axis=1)
        assert a_layer.sum() == count and abs(a_layer - count / layers).max() <= len(counts)


def test_equal_shards_are_dealt_in_turn() -> None:
    """As workers/expert_owners.shard_of does."""
    owners = deal_experts(ExpertGroup((1, 2), (8, 8, 8, 8)), 16)
    assert (owners == np.arange(16) % 4).all()
    with pytest.raises(ValueError, match="16 experts dealt"):
        deal_experts(ExpertGroup((1, 2), (8, 8)), 16)


@pytest.mark.parametrize("parts", [((0.5, 1.0), (0.5, 1.0)), ((0.2, 3.0), (0.5, 1.0), (0.3, 0.0)), ((1.0, 2.0),)])
def test_the_slowest_shard_against_dice(parts: tuple[tuple[float, float], ...]) -> None:
    dice, found = random.Random(1), []
    for _ in range(20_000):
        drawn = dice.choices(range(len(parts)), [share for share, _ in parts], k=16)
        found.append(max(drawn.count(one) * seconds for one, (_, seconds) in enumerate(parts)))
    assert expected_longest(parts, 16) == pytest.approx(sum(found) / len(found), rel=0.01)
