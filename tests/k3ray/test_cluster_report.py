"""Bytes of messages by way, between nodes and within; bytes of memory by node."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from k3ray.cluster.cluster_file import described_node, described_speeds
from k3ray.cluster.placement import place
from k3ray.cluster.seats import ClusterWishes
from k3ray.cluster_report import message_report, node_reports, report_lines
from k3ray.workers.message_counts import MessageCounts, Traffic
from k3ray.workers.model.config import read_config
from k3ray.workers.tape.layout import plan_layout

STAGES = ["layers 0..4", "layers 5..8"]


def exchanged(far_out: bool, far_in: bool, sent: int, received: int, positions: int = 0) -> Traffic:
    traffic = Traffic(positions=positions)
    traffic.place(far_out, far_in)
    traffic.send(sent)
    traffic.receive(received)
    return traffic


def counted(far: bool = True) -> MessageCounts:
    """Of two stages on two nodes, each with a shard beside it; the driver beside the first one."""
    near, other = exchanged(False, False, 50, 500), exchanged(far, far, 60, 600)
    first = MessageCounts.of_stage(STAGES[0], True, False, exchanged(far, False, 3000, 90, 7), [near, other])
    shards = [exchanged(far, far, 1, 10), Traffic()]
    last = MessageCounts.of_stage(STAGES[1], False, True, exchanged(far, far, 400, 3000, 7), shards)
    return first + last


def test_what_leaves_a_node_is_told_from_what_stays() -> None:
    report = message_report(counted(), STAGES)
    assert report.positions == 7
    assert report.ways["layers 0..4 > layers 5..8"] == 3000 and report.ways["driver > layers 0..4"] == 90
    assert report.total_bytes == sum(report.ways.values()) == 90 + 3000 + 550 + 660 + 400 + 11
    # the frame, the far shard of each stage, and the answer to the driver
    assert report.between_nodes_bytes == 3000 + 660 + 400 + 11
    assert report.between_nodes_per_position == (3000 + 660 + 400 + 11) // 7
    one = message_report(counted(far=False), STAGES)
    assert one.between_nodes_bytes == 0 and one.total_bytes == report.total_bytes
    assert "of which 581 between nodes" in report.describe()
    assert list(report_lines((), report)) == []


def test_counts_add_up_and_take_away() -> None:
    counts = counted()
    assert (counts + counts - counts) == counts
    assert (counts - counts) == MessageCounts({}, 0, 0)


@given(st.lists(st.tuples(st.sampled_from(["near", "far", "stale"]), st.integers(0, 9), st.integers(0, 9))))
def test_bytes_count_by_where_the_other_end_is_then(moments: list[tuple[str, int, int]]) -> None:
    """Whatever is told of a process before the present one changes nothing."""
    traffic, far, generation, crossed = Traffic(), False, 1, 0
    traffic.place(far, far, generation)
    for what, sent, received in moments:
        if what == "stale":
            traffic.place(not far, not far, generation - 1)
        else:
            far, generation = what == "far", generation + 1
            traffic.place(far, far, generation)
        traffic.send(sent)
        traffic.receive(received)
        crossed += (sent + received) if far else 0
    assert traffic.far_sent_bytes + traffic.far_received_bytes == crossed
    assert traffic.sent_bytes == sum(sent for _, sent, _ in moments) and traffic.sent == len(moments)
    assert traffic.received_bytes == sum(received for _, _, received in moments)


def test_a_node_that_was_lost_keeps_its_line_without_actors() -> None:
    config = read_config(Path(__file__).parents[1] / "data" / "k3b")
    speeds, layers = described_speeds(50, 2), tuple(range(9))
    nodes = [described_node(name, 2 * 10**9, 2, speeds, layers, driver=name == "a") for name in ("a", "b", "c")]
    placement = place(config, plan_layout(config, 32 << 10), nodes, ClusterWishes(positions=20))
    parts = [actor.budget.name for actor in (*placement.stages, *placement.shards)]
    peaks = {part: 100 + number for number, part in enumerate(parts)}
    planned = {part: placement.nodes[actor.node].name
               for part, actor in zip(parts, (*placement.stages, *placement.shards), strict=True)}  # fmt: skip
    sizes = {actor.budget.name: actor.budget.total_bytes for actor in (*placement.stages, *placement.shards)}
    before = node_reports(placement, planned, "a", 5000, peaks, sizes)
    assert [node.planned_bytes for node in before] == [placement.node_bytes(number) for number in range(3)]
    assert [(node.name, len(node.actors)) for node in before] == [("a", 2), ("b", 2), ("c", 2)]
    assert before[0].measured_bytes == 5000 and before[1].measured_bytes == 101 + 104
    moved = {part: "new" if node == "c" else node for part, node in planned.items()}
    silent = {part: peak for part, peak in peaks.items() if part != parts[2]}
    smaller = sizes | {parts[2]: 1000, parts[5]: 30}  # what found room elsewhere may hold less than was planned
    after = node_reports(placement, moved, "a", 5000, silent, smaller)
    assert [(node.name, len(node.actors), node.measured_bytes) for node in after[1:]] == [
        ("b", 2, 205), ("c", 0, 0), ("new", 2, 105),
    ]  # fmt: skip
    assert after[3].actors[0].measured_bytes is None and (after[2].planned_bytes, after[3].planned_bytes) == (0, 1030)
    assert "b: 0.58 GB planned" in "\n".join(report_lines(after, None))
