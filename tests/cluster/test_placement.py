"""The placement of a cluster: everything once, within budgets, the same each time, never worse with more memory."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3ray.cluster.budget import MemoryFailure, plan_budget, smallest_plan
from k3ray.cluster.budget_plan import HostRun
from k3ray.cluster.cluster_file import described_node, described_speeds
from k3ray.cluster.expert_shares import share_experts
from k3ray.cluster.layer_cuts import SeatDivider, SeatUse, cut_layers
from k3ray.cluster.machine import MemoryLimits
from k3ray.cluster.placement import Placement, place
from k3ray.cluster.plan_check import find_problems
from k3ray.cluster.prediction import DISK, KERNELS
from k3ray.cluster.seat_costs import LayerCosts
from k3ray.cluster.seats import ClusterWishes, PlacementFailure, make_seats
from k3ray.cluster.topology import NodeFacts, NodeSpeeds
from k3ray.cluster.trunk_dial import trunk_dial
from k3ray.cluster.wishes import Wishes
from k3ray.workers.expert_owners import ExpertGroup, deal_experts
from k3ray.workers.model.config import read_config
from k3ray.workers.tape.layout import plan_layout
from k3ray.workers.tape.residency import pinning_order

SMALL = read_config(Path(__file__).parents[1] / "data" / "k3b")
LAYOUT = plan_layout(SMALL, 32 << 10)
POSITIONS = 100
COSTS = LayerCosts(SMALL, LAYOUT, POSITIONS)
LAYERS = tuple(range(SMALL.num_hidden_layers))
SPEEDS = described_speeds(50, 2)
MB = 10**6
GB = 10**9


def node(name: str, memory_bytes: int, **more: object) -> NodeFacts:
    made = described_node(name, memory_bytes, 8, SPEEDS, LAYERS, driver=name == "0")
    return replace(made, **more)  # type: ignore[arg-type]


def enough(number: int, more: int, shards: bool = True) -> int:
    """Available memory of which the planned share is what a node's processes need, and `more` bytes."""
    seats, _ = make_seats([node(str(one), GB) for one in range(number + 1)], ClusterWishes(positions=POSITIONS))
    parts = [COSTS.node_parts(seats[-1]), COSTS.stage_parts(0, 9, 8, True, False)]
    parts += [COSTS.shard_parts()] if shards else []
    return (sum(sum(part.values()) for part in parts) + more) * 10 // 9 + 2


@st.composite
def clusters(draw: st.DrawFn) -> list[NodeFacts]:
    """One to five nodes, some with two memory nodes, from too small to larger than the model."""
    nodes = []
    for number in range(draw(st.integers(1, 5))):
        memory, cores = enough(number, draw(st.integers(0, 12 * MB))), draw(st.integers(1, 9))
        numa = draw(st.integers(1, min(2, cores)))
        speeds = described_speeds(draw(st.integers(10, 90)), draw(st.sampled_from([0.2, 3.0])))
        made = described_node(str(number), memory * numa, cores, speeds, LAYERS, numa=numa, driver=number == 0)
        nodes.append(made)
    return nodes


@st.composite
def wished(draw: st.DrawFn) -> ClusterWishes:
    shards = draw(st.sampled_from([None, None, 0, 1]))
    return ClusterWishes(draw(st.sampled_from([None, None, 1])), shards, positions=POSITIONS)


def placed(nodes: list[NodeFacts], wishes: ClusterWishes) -> Placement | None:
    try:
        return place(SMALL, LAYOUT, nodes, wishes, COSTS)
    except PlacementFailure as failure:
        assert "GB" in str(failure) or "MB" in str(failure) or "bytes" in str(failure)
        return None


def check_placement(placement: Placement, nodes: list[NodeFacts]) -> None:
    """Everything once, and no node over its budget."""
    assert [layer for stage in placement.stages for layer in range(stage.first, stage.stop)] == list(LAYERS)
    owned = np.zeros((len(LAYERS), SMALL.num_experts), dtype=int)
    counts = [0] * len(placement.shards)
    for group in placement.experts:
        owners = deal_experts(group, SMALL.num_experts)
        for shard in range(len(counts)):
            counts[shard] += int((owners == shard).sum())
        assert owners.min() >= 0 and owners.max() < len(placement.shards)
        owned[list(group.layers)] += 1
    if placement.shards:
        assert (owned[list(SMALL.moe_layers)] == 1).all() and owned.sum() == len(SMALL.moe_layers) * SMALL.num_experts
        assert counts == [shard.budget.owned_experts for shard in placement.shards]
        assert not any(stage.budget.owned_experts for stage in placement.stages)
    owners_of = placement.shards or placement.stages
    assert sum(one.budget.owned_experts for one in owners_of) == len(SMALL.moe_layers) * SMALL.num_experts
    chunks = 0
    for stage in placement.stages:
        run = LAYOUT.chunks_of(stage.first, stage.stop, stage.stop == len(LAYERS))
        chunks += len(run)
        assert 0 <= stage.budget.pinned_chunks <= len(run)
        order = pinning_order(len(run))[stage.budget.pinned_chunks :]
        streamed = sum(LAYOUT.chunks[run[place]].nbytes for place in order)
        assert stage.budget.streamed_bytes == streamed
    assert chunks == len(LAYOUT.chunks)
    assert placement.prediction.trunk_bytes == sum(stage.budget.streamed_bytes for stage in placement.stages)
    for number, facts in enumerate(nodes):
        actors = placement.actors_of(number)
        assert placement.node_bytes(number) <= placement.nodes[number].budget_bytes <= facts.available_bytes
        assert all(actor.threads >= 1 and set(actor.cores) <= set(facts.cores) for actor in actors)
        for numa in facts.numa:
            here = [actor for actor in actors if actor.numa == numa.number]
            assert all(set(actor.cores) <= set(numa.cores) for actor in here)
        taken = [core for actor in actors for core in actor.cores]
        if len(facts.cores) >= len(actors) and len(facts.numa) == 1:
            assert len(taken) == len(set(taken))
    assert all(0 <= one.budget.cache_slots <= one.budget.owned_experts for one in owners_of)


@settings(max_examples=60)
@given(nodes=clusters(), wishes=wished())
def test_everything_is_placed_once_within_every_budget(nodes: list[NodeFacts], wishes: ClusterWishes) -> None:
    placement = placed(nodes, wishes)
    if placement is not None:
        check_placement(placement, nodes)
        assert list(find_problems(placement, SMALL)) == [], "a plan written down is one that can be read back"
        assert placement == place(SMALL, LAYOUT, nodes, wishes, LayerCosts(SMALL, LAYOUT, POSITIONS))


@settings(max_examples=80)
@given(nodes=clusters(), wishes=wished(), which=st.integers(0, 4), more=st.integers(1, 60 * MB))
def test_more_memory_is_never_refused_and_never_reads_more(
    nodes: list[NodeFacts], wishes: ClusterWishes, which: int, more: int
) -> None:
    if wishes.stages is not None or wishes.shards == 1:
        which = max(range(len(nodes)), key=lambda one: (nodes[one].available_bytes / len(nodes[one].numa), -one))
    before = placed(nodes, wishes)
    which %= len(nodes)
    numa = tuple(replace(one, memory_bytes=one.memory_bytes + more) for one in nodes[which].numa)
    larger = replace(nodes[which], available_bytes=nodes[which].available_bytes + more * len(numa), numa=numa)
    after = placed([*nodes[:which], larger, *nodes[which + 1 :]], wishes)
    if before is not None:
        assert after is not None
        assert after.prediction.read_bytes <= before.prediction.read_bytes


@settings(max_examples=30)
@given(extras=st.tuples(*[st.integers(0, 3 * MB)] * 3), shards=st.booleans())
def test_no_other_cut_reads_less(extras: tuple[int, int, int], shards: bool) -> None:
    """Against all cuts of nine layers into three, tried one by one."""
    nodes = [node(str(number), enough(number, more, shards)) for number, more in enumerate(extras)]
    seats, _ = make_seats(nodes, ClusterWishes(positions=POSITIONS))
    uses = [SeatUse(seat, 4, shards, shards, False) for seat in seats]
    divider = SeatDivider(COSTS)
    tried = []
    for cuts in combinations(range(1, 9), 2):
        runs = pairwise((0, *cuts, 9))
        divided = [divider.divide(use, first, stop) for use, (first, stop) in zip(uses, runs, strict=True)]
        tried += [divider.token_bytes([one for one in divided if one])] if None not in divided else []
    if not tried:
        with pytest.raises(PlacementFailure):
            cut_layers(divider, uses)
        return
    assert divider.token_bytes(cut_layers(divider, uses)) == min(tried)


def test_one_node_is_planned_as_one_host_is() -> None:
    """Against the budget of one host, at sizes from the least to everything."""
    run = HostRun(SMALL, LAYOUT, (0, 9), 0, threads=8, positions=POSITIONS)
    least = smallest_plan(run).total_bytes
    for more in (0, 1 * MB, 3 * MB, 5 * MB, 8 * MB, 100 * MB):
        total = least + more
        plan = plan_budget(run, Wishes(total_bytes=total), MemoryLimits(1 << 50, "MemAvailable", 1 << 50))
        placement = place(
            SMALL, LAYOUT, [node("0", 1 << 40)], ClusterWishes(memory_bytes=total, positions=POSITIONS), COSTS
        )
        stage = placement.stages[0].budget
        assert (stage.pinned_chunks, stage.ring_chunks, stage.cache_slots, stage.streamed_bytes) == (
            plan.stages[0].pinned_chunks, plan.stages[0].ring_chunks, plan.stages[0].cache_slots,
            plan.stages[0].streamed_bytes,
        )  # fmt: skip
        assert placement.node_bytes(0) == plan.total_bytes
    with pytest.raises(MemoryFailure):
        plan_budget(run, Wishes(total_bytes=least - 1), MemoryLimits(1 << 50, "MemAvailable", 1 << 50))
    with pytest.raises(PlacementFailure, match="at most 8 layers"):
        place(SMALL, LAYOUT, [node("0", 1 << 40)], ClusterWishes(memory_bytes=least - 1, positions=POSITIONS), COSTS)


@settings(max_examples=40)
@given(cut=st.integers(1, 8), tail=st.booleans(), pages=st.sampled_from([1, 2, 3, 8, 40]), share=st.floats(0, 1.2))
def test_the_quick_arithmetic_is_the_dials(cut: int, tail: bool, pages: int, share: float) -> None:
    """pinned_chunks against trunk_dial, which tests/cluster/test_budget.py holds to the tape."""
    costs = small_costs(pages)
    first, stop = (cut, 9) if tail else (0, cut)
    chunks = HostRun(SMALL, costs.layout, (0, cut, 9), 0, 2, 5).stage_chunks[tail]
    only = replace(costs.layout, chunks=tuple(costs.layout.chunks[number] for number in chunks))
    dial = trunk_dial(HostRun(SMALL, only, (0, 9), 0, 2, 5))
    assert costs.trunk_bytes(first, stop) == dial.pinned_bytes[-1]
    assert [costs.trunk_memory(first, stop, pinned) for pinned in range(dial.last + 1)] == list(dial.memory_bytes)
    room = int(max(dial.memory_bytes) * share)
    assert costs.pinned_chunks(first, stop, room) == dial.highest(room)


@lru_cache
def small_costs(pages: int) -> LayerCosts:
    return LayerCosts(SMALL, plan_layout(SMALL, pages << 12), 5)


def test_what_one_host_streams_four_hold() -> None:
    one = place(SMALL, LAYOUT, [node("0", enough(0, -135 * MB))], ClusterWishes(positions=POSITIONS), COSTS)
    nodes = [node(str(number), enough(number, 4 * MB)) for number in range(4)]
    four = place(SMALL, LAYOUT, nodes, ClusterWishes(positions=POSITIONS), COSTS)
    assert len(one.stages) == 1 and not one.shards and one.prediction.trunk_bytes > 0
    assert len(four.stages) == len(four.shards) == 4 and four.prediction.read_bytes == 0
    check_placement(four, nodes)


def test_experts_go_to_the_fast_disks_when_memory_does_not_hold_them() -> None:
    slow, fast = (replace(SPEEDS, disk_experts=rate * GB) for rate in (1.0, 3.0))
    groups = share_experts([1, 2], 64, [frozenset({1, 2})] * 2, [10, 10], [1.0, 3.0], [1.0, 1.0])
    assert groups == (ExpertGroup((1, 2), (10 + 27, 10 + 81)),)
    nodes = [node("0", enough(0, 3 * MB), speeds=slow), node("1", enough(1, 3 * MB), speeds=fast)]
    shards = place(SMALL, LAYOUT, nodes, ClusterWishes(positions=POSITIONS), COSTS).shards
    missing = [shard.budget.owned_experts - shard.budget.cache_slots for shard in shards]
    assert missing[0] and abs(missing[1] - 3 * missing[0]) <= 3


def test_partial_copies_get_their_own_layers_only() -> None:
    nodes = [node("0", 900 * MB), node("1", 900 * MB)]
    halves = [(0, 1, 2, 3, 4), (4, 5, 6, 7, 8)]
    nodes = [
        replace(one, models=(replace(one.models[0], layers=half),)) for one, half in zip(nodes, halves, strict=True)
    ]
    placement = place(SMALL, LAYOUT, nodes, ClusterWishes(positions=POSITIONS), COSTS)
    check_placement(placement, nodes)
    for group in placement.experts:
        for shard, half in zip(group.counts, halves, strict=True):
            assert not shard or set(group.layers) <= set(half)
    assert placement.stages[0].stop in (4, 5)
    first = replace(nodes[0], available_bytes=901 * MB)
    with pytest.raises(PlacementFailure, match=r"experts of the layers 5, 6, 7, 8 \(4 in all\)"):
        place(SMALL, LAYOUT, [first, nodes[1]], ClusterWishes(shards=1, positions=POSITIONS), COSTS)
    gap = replace(nodes[1], models=(replace(nodes[1].models[0], layers=(6, 7, 8)),))
    with pytest.raises(PlacementFailure, match="does not hold the 9 layers"):
        place(SMALL, LAYOUT, [nodes[0], gap], ClusterWishes(positions=POSITIONS), COSTS)


@pytest.mark.parametrize(
    ("wishes", "said"),
    [
        (ClusterWishes(stages=3), "--stages: found 3, expected 1 to 2: 2 places"),
        (ClusterWishes(shards=5), "--expert-shards: found 5"),
        (ClusterWishes(seats=0), "--seats: found 0"),
        (ClusterWishes(positions=0), "--positions: found 0"),
        (ClusterWishes(memory_bytes=GB), "asks for 1.00 GB and 0.90 GB are available"),
        (ClusterWishes(preset="server"), "--preset server asks for 480.00 GB"),
        (ClusterWishes(preset="ultra"), "found 'ultra', expected one of laptop"),
        (ClusterWishes(memory_bytes=300 * MB), "node 1: 0.30 GB, at most 0 layers: it needs what the node has once 0."),
    ],
)
def test_wishes_that_cannot_be_met(wishes: ClusterWishes, said: str) -> None:
    with pytest.raises(PlacementFailure) as failure:
        place(SMALL, LAYOUT, [node("0", 900 * MB), node("1", 900 * MB)], wishes)
    assert said in str(failure.value) and failure.value.exit_code == 2
    with pytest.raises(PlacementFailure, match="no node can take part"):
        place(SMALL, LAYOUT, [], wishes)


def test_speeds_that_nobody_measured_leave_the_seconds_open() -> None:
    nodes = [node("0", 900 * MB, speeds=NodeSpeeds()), node("1", 900 * MB)]
    predicted = place(SMALL, LAYOUT, nodes, ClusterWishes(positions=POSITIONS), COSTS).prediction
    assert predicted.seconds is predicted.tokens_per_s is None and predicted.dominated_by == "not known"
    assert predicted.network_s > 0


def test_the_released_model(shared_data: Path) -> None:
    """Sixteen hosts of 128 GB hold all of it; one of 32 GB reads three quarters of the trunk a token."""
    config = read_config(shared_data / "k3-release")
    layout = plan_layout(config)
    costs = LayerCosts(config, layout, 4096)
    assert costs.trunk_bytes(0, 93) == layout.total_bytes

    def hosts(count: int, memory: int) -> list[NodeFacts]:
        speeds = described_speeds(100, 3.2)
        return [described_node(f"host-{number}", memory * GB, 32, speeds, tuple(range(93)), driver=number == 0)
                for number in range(count)]  # fmt: skip

    all_in = place(config, layout, hosts(16, 128), ClusterWishes(), costs)
    assert all_in.prediction.read_bytes == 0 and all_in.prediction.dominated_by == KERNELS
    lengths = [stage.stop - stage.first for stage in all_in.stages]
    assert sum(lengths) == 93 and max(lengths) - min(lengths) <= 2
    assert sum(shard.budget.owned_experts for shard in all_in.shards) == 82_432
    held = sum(shard.budget.parts["expert slots"] for shard in all_in.shards)
    assert held == 82_432 * (17_547_264 + 6 * 4096)
    one = place(config, layout, hosts(1, 32), ClusterWishes(), costs)
    assert not one.shards and one.prediction.dominated_by == DISK
    assert 0.75 < one.prediction.trunk_bytes / layout.total_bytes < 0.76
    unequal = place(config, layout, [*hosts(1, 256), *(replace(host, name=f"small-{host.name}", driver=False)
                                                      for host in hosts(2, 16))], ClusterWishes(), costs)  # fmt: skip
    assert unequal.stages[0].stop > 70
    with pytest.raises(PlacementFailure, match="together too few"):
        place(config, layout, hosts(2, 1), ClusterWishes(), costs)
