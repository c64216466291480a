"""Placement by itself: nodes that are too small are left out and named; what cannot be is refused with the memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from k3ray.cluster.cluster_file import described_node, described_speeds
from k3ray.cluster.seats import ClusterWishes, PlacementFailure
from k3ray.cluster.topology import NodeFacts
from k3ray.placing import place_what_fits
from k3ray.workers.model.config import read_config
from k3ray.workers.tape.layout import plan_layout

SMALL = read_config(Path(__file__).parents[1] / "data" / "k3b")
LAYOUT = plan_layout(SMALL, 32 << 10)
MB = 10**6


def node(name: str, memory_bytes: int) -> NodeFacts:
    made = described_node(name, memory_bytes, 4, described_speeds(50, 2), tuple(range(9)), driver=name == "a")
    return replace(made, decided_by="Ray")


def test_nodes_that_are_too_small_are_left_out_and_said() -> None:
    nodes = [node("a", 900 * MB), node("b", 200 * MB), node("c", 800 * MB), node("d", 300 * MB)]
    said: list[str] = []
    placement, used = place_what_fits(SMALL, LAYOUT, nodes, ClusterWishes(positions=20, packed=False), said.append)
    assert [one.name for one in used] == [one.name for one in placement.nodes] == ["a", "c"]
    assert [line.partition(":")[0] for line in said] == ["b", "d"]
    assert said[0] == "b: left out: 0.20 GB there are too few for a part of this model"
    whole, used = place_what_fits(SMALL, LAYOUT, nodes[::2], ClusterWishes(positions=20, packed=False), said.append)
    assert whole == placement and len(said) == 2


def test_a_node_with_part_of_the_model_does_not_take_a_whole_one_with_it() -> None:
    """Not the node with least memory is in the way here, but the one that has no head."""
    whole = node("c", 900 * MB)
    part = replace(whole, models=tuple(replace(copy, layers=(0, 1, 2), top=False) for copy in whole.models))
    said: list[str] = []
    wishes = ClusterWishes(positions=20, packed=False)
    _, used = place_what_fits(SMALL, LAYOUT, [node("a", 900 * MB), node("b", 800 * MB), part], wishes, said.append)
    assert [one.name for one in used] == ["a", "b"]
    (line,) = said
    assert line.startswith("c: left out: 0.90 GB and 3 layers whole on its disks make no part")


def test_a_cluster_that_is_too_small_is_refused_with_what_each_node_has() -> None:
    nodes, said = [node("a", 100 * MB), node("b", 200 * MB)], list[str]()
    with pytest.raises(PlacementFailure) as refused:
        place_what_fits(SMALL, LAYOUT, nodes, ClusterWishes(positions=20, packed=False), said.append)
    text = str(refused.value)
    assert "does not hold the 9 layers" in text and text.endswith("available: a 0.10 GB (Ray); b 0.20 GB (Ray)")
    assert "node 2" in text and not said and refused.value.exit_code == 2
