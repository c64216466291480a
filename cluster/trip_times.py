"""What passes between the stages of a token: calls and trips with their fixed times, and bytes over the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from k3ray.cluster.message_sizes import shard_name, stage_name
from k3ray.cluster.seats import Seat
from k3ray.workers.expert_owners import ExpertGroup
from k3ray.workers.message_counts import ARROW, DRIVER

DRIVER_S = 2.6e-3  # a token's part of the driver: its frame, its step kept, its logits taken out of Ray's store
CALL_S = 2.7e-3  # one Ray call, from driver to stage or from stage to stage; both measured: benchmarks/prediction.py
TRIP_S = 0.16e-3  # one question to a shard of the same host over our sockets: benchmarks/hop.py, with its encoding
MORE_TRIP = 0.5  # of a trip more for every further shard that is asked at once: the same benchmark
AWAY_S = 0.1e-3  # more where a shard is on another host: an ordinary switch, both ways
NETWORK_BYTES_S = 1.25e9  # ten gigabits, where nothing else is known


@dataclass(frozen=True, slots=True)
class Between:
    """Of one token. trips: messages that are waited for one after the other. sent_bytes: what leaves a node."""

    trips: int
    sent_bytes: int
    seconds: float


def between_stages(
    stages: Sequence[tuple[Seat, tuple[int, int]]],
    shards: Sequence[Seat],
    groups: Sequence[ExpertGroup],
    ways: Mapping[str, int],
) -> Between:
    """The driver and a Ray call a stage; for each MoE layer one trip to all shards that have any of its experts.

    Each has its fixed time, on one node too. stages: with their layers, first..stop-1. ways: bytes of all messages.
    """
    seats = {stage_name(run): seat for seat, run in stages}
    seats |= {shard_name(number, len(shards)): seat for number, seat in enumerate(shards)}
    sent, seconds = 0, DRIVER_S + len(stages) * CALL_S
    for way, nbytes in ways.items():
        ends = way.split(ARROW)
        if _leaves(ends, seats):
            sent += nbytes
            link = seats[next(end for end in ends if end != DRIVER)].speeds.network
            seconds += nbytes / (link or NETWORK_BYTES_S)
    trips = len(stages)
    for seat, (first, stop) in stages:
        for group in groups:
            layers = sum(first <= layer < stop for layer in group.layers)
            asked = [shards[number] for number, count in enumerate(group.counts) if count]
            away = any(shard.node != seat.node for shard in asked)
            fixed_s = (seat.speeds.trip_s or TRIP_S) * (1 + MORE_TRIP * (len(asked) - 1))
            trips += layers
            seconds += layers * (fixed_s + (AWAY_S if away else 0.0))
    return Between(trips, sent, seconds)


def _leaves(ends: Sequence[str], seats: Mapping[str, Seat]) -> bool:
    """Whether a way leaves its node; the driver is where a seat says so."""
    found = [seats[end] for end in ends if end != DRIVER]
    if len(found) == 1:
        return not found[0].driver
    return found[0].node != found[1].node
