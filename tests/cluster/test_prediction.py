"""The prediction: its formula by hand and by properties, the speeds that it takes, and the bytes of messages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3ray.cluster.cluster_file import described_node, described_speeds
from k3ray.cluster.kernel_rates import rate_of, rate_together
from k3ray.cluster.memory_parts import expert_bytes, shared_bytes
from k3ray.cluster.message_sizes import (
    chance,
    frame_size,
    logits_size,
    reply_size,
    request_size,
    routed_ways,
    stage_ways,
    token_ways,
)
from k3ray.cluster.placement import place
from k3ray.cluster.seat_costs import LayerCosts
from k3ray.cluster.seats import ClusterWishes, Seat, make_seats
from k3ray.cluster.slowest_shard import expected_longest
from k3ray.cluster.token_time import Turn, token_time
from k3ray.cluster.topology import NodeFacts, NodeSpeeds, ThreadSpeeds
from k3ray.cluster.trip_times import AWAY_S, CALL_S, DRIVER_S, MORE_TRIP, TRIP_S, between_stages
from k3ray.workers.expert_owners import ExpertGroup, ExpertOwners
from k3ray.workers.model.config import read_config
from k3ray.workers.tape.layout import plan_layout

SMALL = read_config(Path(__file__).parents[1] / "data" / "k3b")
LAYOUT = plan_layout(SMALL, 32 << 10)
POSITIONS = 100
COSTS = LayerCosts(SMALL, LAYOUT, POSITIONS)
MB, GB = 10**6, 10**9
MOE = len(SMALL.moe_layers)
TOP_K = SMALL.num_experts_per_token
seconds = st.floats(0, 10)


def node(name: str, memory_bytes: int = 900 * MB, cores: int = 8, speeds: NodeSpeeds | None = None) -> NodeFacts:
    layers = tuple(range(SMALL.num_hidden_layers))
    return described_node(name, memory_bytes, cores, speeds or described_speeds(50, 2), layers, driver=name == "0")


def test_two_equal_nodes_that_hold_everything_by_hand() -> None:
    """Trunk at its speed but for the shared experts, which the slowest shard takes with it; one hop, the trips."""
    placement = place(SMALL, LAYOUT, [node("0"), node("1")], ClusterWishes(positions=POSITIONS), COSTS)
    found = placement.prediction
    assert found.disk_s == 0 and found.read_bytes == found.expert_bytes_at_most == 0
    stage, shard = placement.stages[0].threads / 8, placement.shards[0].threads / 8
    assert stage + shard == 1 and placement.experts[0].counts == (64, 64)
    shared_s = shared_bytes(SMALL) / (30 * GB * stage)
    trunk_s = (COSTS.trunk_bytes(0, 9) + COSTS.state_bytes(0, 9)) / (30 * GB * stage)
    an_expert = 3 * SMALL.routed_expert_hidden_size * SMALL.moe_intermediate_size * 17 // 32
    each_s = an_expert / (15 * GB * shard)
    slowest_s = expected_longest(((0.5, each_s), (0.5, each_s)), TOP_K, shared_s)
    assert found.kernels_s == pytest.approx(trunk_s + MOE * (slowest_s - shared_s))
    fixed_s = DRIVER_S + 2 * CALL_S + MOE * (TRIP_S * (1 + MORE_TRIP) + AWAY_S)
    assert found.network_s == pytest.approx(fixed_s + found.network_bytes / 1.25e9, rel=1e-6)
    assert found.trips == 2 + MOE
    between = [way for way in found.way_bytes if "layers" in way.split(" > ")[0] and "layers" in way.split(" > ")[1]]
    cut = placement.stages[0].stop
    assert [found.way_bytes[way] for way in between] == [frame_size(SMALL, cut)]
    logits = found.way_bytes[f"layers {cut}..8 > driver"]
    crossing = [f"layers 0..{cut - 1} > shard 1 of 2", f"shard 1 of 2 > layers 0..{cut - 1}",
                f"layers {cut}..8 > shard 0 of 2", f"shard 0 of 2 > layers {cut}..8"]  # fmt: skip
    assert found.network_bytes == frame_size(SMALL, cut) + logits + sum(found.way_bytes[way] for way in crossing)


def test_a_disk_that_was_not_measured_matters_only_where_it_is_read() -> None:
    speeds = replace(described_speeds(50, 2), disk_chunks=None, disk_experts=None)
    inside = place(SMALL, LAYOUT, [node("0", speeds=speeds)], ClusterWishes(positions=POSITIONS), COSTS).prediction
    assert inside.seconds is not None and inside.disk_s == 0
    parts = COSTS.node_parts(make_seats([node("0")], ClusterWishes(positions=POSITIONS))[0][0])
    fixed = sum(parts.values()) + sum(COSTS.stage_parts(0, 9, 8, False, True).values())
    small = ClusterWishes(positions=POSITIONS, memory_bytes=fixed + 700_000)
    streaming = place(SMALL, LAYOUT, [node("0")], small, COSTS).prediction
    assert streaming.trunk_bytes > 0 and streaming.seconds is not None
    unknown = place(SMALL, LAYOUT, [node("0", speeds=speeds)], small, COSTS).prediction
    assert unknown.trunk_bytes == streaming.trunk_bytes and unknown.seconds is unknown.disk_s is None


@pytest.mark.parametrize(
    ("turn", "disk_s", "kernels_s"),
    [
        (Turn(3.0, 2.0), 0.0, 5.0),
        (Turn(3.0, 2.0, True, 0.0, 2.0), 2.0, 3.0),
        (Turn(3.0, 2.0, True, 9.0, 2.0), 11.0, 0.0),  # all that is read, while the cores work
        (Turn(3.0, 2.0, False, 9.0, 1.0), 8.0, 2.0),
        (Turn(3.0, 2.0, False, 3.0, 1.0), 0.0, 5.0),
    ],
)
def test_a_turn_is_the_longer_of_disk_and_cores(turn: Turn, disk_s: float, kernels_s: float) -> None:
    found = token_time([turn], 0.0)
    assert (found.disk_s, found.kernels_s) == (disk_s, kernels_s)


def test_a_ring_fills_while_others_have_their_turn() -> None:
    streaming, other = Turn(1.0, trunk_read_s=4.0, ahead_s=3.0, disk=0), Turn(2.0, disk=1)
    found = token_time([streaming, other], 0.0)
    assert found.disk_s + found.kernels_s == 2.0 + (4.0 - 2.0)  # no more than the other one's two seconds
    longer = token_time([streaming, replace(other, kernels_s=50.0)], 0.0)
    assert longer.disk_s + longer.kernels_s == 50.0 + 1.0  # the whole ring
    both = [replace(streaming, ahead_s=4.0), replace(streaming, ahead_s=4.0)]
    shared = token_time(both, 0.0)
    assert shared.disk_s + shared.kernels_s == 8.0  # one disk gives no more than it can, whoever reads ahead


@st.composite
def turns(draw: st.DrawFn) -> list[Turn]:
    found = []
    for disk in range(draw(st.integers(1, 4))):
        kernels_s, experts_s, trunk_s, read_s, ahead_s = (draw(seconds) for _ in range(5))
        wait = draw(st.booleans()) and read_s > 0
        found.append(Turn(kernels_s, experts_s, wait, trunk_s, min(read_s, experts_s), ahead_s, disk % 2))
    return found


@given(turns=turns(), between_s=seconds)
def test_no_token_is_quicker_than_its_cores_or_its_disks(turns: list[Turn], between_s: float) -> None:
    found = token_time(turns, between_s)
    assert min(found.disk_s, found.kernels_s) >= 0
    whole = found.disk_s + found.kernels_s
    assert whole >= sum(turn.kernels_s + turn.experts_s for turn in turns) - 1e-9
    for disk in (0, 1):
        assert whole + between_s >= sum(t.trunk_read_s + t.experts_read_s for t in turns if t.disk == disk) - 1e-9
    assert whole <= sum(turn.seconds() for turn in turns) + 1e-9
    without = token_time([replace(turn, ahead_s=0.0) for turn in turns], between_s)
    assert whole <= without.disk_s + without.kernels_s + 1e-9


SPEEDS = NodeSpeeds("day", 40.0, 20.0, 10.0, 2.0, 2.0, by_threads=(
    ThreadSpeeds(1, 8.0, 3.0), ThreadSpeeds(4, 17.0, 9.0), ThreadSpeeds(8, 20.0, 10.0)))  # fmt: skip


def seats_of(count: int, speeds: NodeSpeeds = SPEEDS) -> tuple[Seat, ...]:
    return make_seats([node("0", speeds=speeds)], ClusterWishes(seats=count, positions=POSITIONS))[0]


def test_rates_are_those_that_were_measured_with_as_many_threads() -> None:
    seat = seats_of(2)[0]
    assert seat.threads == 4 and seat.node_threads == 8 and seat.speeds.trunk == 10.0  # its half of all
    assert [rate_of("trunk", seat, threads) for threads in (1, 2, 4, 6, 8, 20)] == [8, 11, 17, 18.5, 20, 20]
    assert rate_of("experts", seat, 1) == 3.0
    assert rate_together("experts", seat, 4, 8) == 5.0 and rate_together("experts", seat, 4, 4) == 9.0
    assert rate_together("experts", seat, 1, 4) == pytest.approx(2.25)
    bound = replace(seat, numa=1)
    assert rate_of("trunk", bound, 4) == 10.0 and rate_of("trunk", bound, 1) == 8.0
    even = seats_of(2, replace(SPEEDS, by_threads=()))[0]
    assert [rate_of("trunk", even, threads) for threads in (1, 4, 9)] == [2.5, 10, 10]
    assert rate_together("trunk", even, 2, 8) == 5.0
    assert rate_of("trunk", seats_of(1, NodeSpeeds())[0], 1) is None


@given(threads=st.integers(1, 12), more=st.integers(0, 12))
def test_more_threads_are_never_slower_and_together_never_faster_than_all(threads: int, more: int) -> None:
    seat = seats_of(2)[0]
    few, many = rate_of("trunk", seat, threads), rate_of("trunk", seat, threads + more)
    assert few is not None and many is not None and few <= many <= 20
    mine, theirs = (rate_together("trunk", seat, count, threads + more) for count in (threads, more))
    assert mine is not None and theirs is not None and mine <= few
    assert mine + (theirs if more else 0) <= many + 1e-9


def test_shards_that_share_cores_with_their_stage_take_the_sum() -> None:
    """Two seats of one thread each: stage and shard take turns on a core, and 3 threads of work share 2 cores."""
    experts = (
        2 * 2.75 * expert_bytes(SMALL) * 1.5e9 / shared_bytes(SMALL)
    )  # the shared ones as long as the slowest shard
    speeds = NodeSpeeds("day", 4e9, 2e9, experts, trip_s=1e-3, by_threads=(
        ThreadSpeeds(1, 1.5e9, 0.6 * experts), ThreadSpeeds(2, 2e9, experts)))  # fmt: skip
    wishes = ClusterWishes(seats=2, positions=POSITIONS)
    found = place(SMALL, LAYOUT, [node("0", 1800 * MB, 2, speeds)], wishes, COSTS).prediction
    trunk = (COSTS.trunk_bytes(0, 9) + COSTS.state_bytes(0, 9)) / 1.5e9
    shared_s, each_s = shared_bytes(SMALL) / 1.5e9, expert_bytes(SMALL) / (experts / 2)
    slowest_s = expected_longest(((0.5, each_s), (0.5, each_s)), TOP_K, shared_s)
    a_layer_s = (shared_s + TOP_K * each_s) / 2
    assert a_layer_s > slowest_s
    assert found.kernels_s == pytest.approx(trunk + MOE * (a_layer_s - shared_s))
    assert found.network_s == pytest.approx(DRIVER_S + 2 * CALL_S + MOE * 1e-3 * 1.5) and found.network_bytes == 0


@pytest.mark.parametrize("least", [0.0, 0.5, 2.0, 100.0])
def test_the_slowest_is_never_less_than_what_goes_on_meanwhile(least: float) -> None:
    parts = ((0.25, 1.0), (0.75, 0.5))
    dice, found = np.random.default_rng(1), []
    for drawn in dice.multinomial(8, [0.25, 0.75], 20_000):
        found.append(max(least, drawn[0] * 1.0, drawn[1] * 0.5))
    assert expected_longest(parts, 8, least) == pytest.approx(float(np.mean(found)), rel=0.01)


def test_sizes_of_messages_grow_with_what_they_carry() -> None:
    """The payload by hand; the frame around it is Arrow's, the same for all of a kind but for the ids' padding."""
    hidden, latent = 4 * SMALL.hidden_size, 4 * SMALL.routed_expert_hidden_size
    assert frame_size(SMALL, 5) - frame_size(SMALL, 2) == hidden * (
        -(-5 // SMALL.attn_res_block_size) - -(-2 // SMALL.attn_res_block_size)
    )
    assert reply_size(SMALL, 1, 3) - reply_size(SMALL, 1, 1) == 2 * latent
    assert logits_size(SMALL, 2) - logits_size(SMALL, 1) == 4 * SMALL.vocab_size + 16
    assert request_size(SMALL, 1, 4, tokens=2) - request_size(SMALL, 1, 4) == latent + 8
    assert frame_size(SMALL, 0, step=999) == frame_size(SMALL, 0) == frame_size(SMALL, 0, step=1000) - 8


def test_chances_are_those_of_drawing_without_putting_back() -> None:
    assert sum(chance(pairs, 4, 5, 16) for pairs in range(5)) == pytest.approx(1)
    assert sum(pairs * chance(pairs, 4, 5, 16) for pairs in range(5)) == pytest.approx(4 * 5 / 16)
    assert chance(4, 4, 3, 16) == 0 and chance(4, 4, 16, 16) == 1


@pytest.mark.parametrize("counts", [(64, 64), (96, 32), (128, 0), (77, 51)])
def test_expected_bytes_of_shards_are_the_mean_of_routed_ones(counts: tuple[int, int]) -> None:
    """Random routing, sized message by message, has the predicted bytes in the long run; stages' ways are exact."""
    runs, groups = [(0, 4), (4, 9)], (ExpertGroup(SMALL.moe_layers, counts),)
    found = token_ways(SMALL, runs, groups, 2)
    owners, dice, times = ExpertOwners(2, SMALL.num_experts, groups), np.random.default_rng(0), 400
    routing = [
        (step, layer, dice.permutation(SMALL.num_experts)[None, :TOP_K].astype(np.int32))
        for step in range(times)
        for layer in SMALL.moe_layers
    ]
    measured = routed_ways(SMALL, runs, owners, 2, routing)
    assert set(found) == set(measured) | set(stage_ways(SMALL, runs))
    for way, nbytes in measured.items():
        assert found[way] == pytest.approx(nbytes / times, rel=0.04)
    for way, exact in stage_ways(SMALL, runs).items():
        assert found[way] == exact


def test_ways_are_counted_between_nodes_only_where_they_leave_one() -> None:
    seats, _ = make_seats([node("0"), node("1")], ClusterWishes(positions=POSITIONS))
    runs, groups = [(0, 4), (4, 9)], (ExpertGroup(SMALL.moe_layers, (64, 64)),)
    ways = token_ways(SMALL, runs, groups, 2)
    alone = between_stages([(seats[0], (0, 9))], [], (), token_ways(SMALL, [(0, 9)], (), 0))
    assert alone.sent_bytes == 0 and alone.trips == 1 and alone.seconds == DRIVER_S + CALL_S
    together = between_stages([(seats[0], runs[0]), (seats[0], runs[1])], [seats[0], seats[0]], groups, ways)
    assert together.sent_bytes == 0
    afar = between_stages([(seats[1], runs[0]), (seats[1], runs[1])], [seats[1], seats[1]], groups, ways)
    assert afar.sent_bytes == frame_size(SMALL, 0) + logits_size(SMALL)


def test_predict_is_the_same_each_time() -> None:
    nodes = [node("0"), node("1", cores=3)]
    once, again = (place(SMALL, LAYOUT, nodes, ClusterWishes(positions=POSITIONS)).prediction for _ in range(2))
    assert once == again
