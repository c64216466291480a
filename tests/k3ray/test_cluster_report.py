"""Bytes of messages by way, between nodes and within; bytes of memory by node."""

from __future__ import annotations

from k3ray.cluster_report import message_report, report_lines
from k3ray.workers.message_counts import MessageCounts, Traffic

STAGES = ["layers 0..4", "layers 5..8"]
NODES = {"layers 0..4": "a", "layers 5..8": "b", "shard 0 of 2": "a", "shard 1 of 2": "b"}


def counted() -> MessageCounts:
    first = MessageCounts.of_stage(
        STAGES[0], True, False, Traffic(3, 3000, 90, 7), [Traffic(5, 50, 500), Traffic(6, 60, 600)]
    )
    last = MessageCounts.of_stage(STAGES[1], False, True, Traffic(3, 400, 3000, 7), [Traffic(1, 1, 10), Traffic()])
    return first + last


def test_what_leaves_a_node_is_told_from_what_stays() -> None:
    report = message_report(counted(), NODES, STAGES, "a")
    assert report.positions == 7
    assert report.ways["layers 0..4 > layers 5..8"] == 3000 and report.ways["driver > layers 0..4"] == 90
    assert report.total_bytes == sum(report.ways.values()) == 90 + 3000 + 550 + 660 + 400 + 11
    # the frame, the far shard of each stage, and the answer to the driver
    assert report.between_nodes_bytes == 3000 + 660 + 400 + 11
    assert report.between_nodes_per_position == (3000 + 660 + 400 + 11) // 7
    one = message_report(counted(), dict.fromkeys(NODES, ""), STAGES, "")
    assert one.between_nodes_bytes == 0 and one.total_bytes == report.total_bytes
    assert "of which 581 between nodes" in report.describe()
    assert list(report_lines((), report)) == []


def test_counts_add_up_and_take_away() -> None:
    counts = counted()
    assert (counts + counts - counts) == counts
    assert (counts - counts).way_bytes == {} and (counts - counts).positions == 0
