"""What a token after the prompt should cost under a placement: bytes, seconds, and the term that dominates.

Terms are added, since a token passes its layers one after the other: per stage its trunk at the slower of the
kernels' speed and the disk's, which work at once; per MoE layer the slowest shard, by the exact expectation of the
most that evenly routed experts ask of one; per trip the network. docs/cluster.md explains each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from k3ray.cluster import memory_parts
from k3ray.cluster.budget_plan import ActorBudget
from k3ray.cluster.layer_cuts import Division
from k3ray.cluster.seat_costs import LayerCosts
from k3ray.cluster.seats import Seat
from k3ray.cluster.slowest_shard import expected_longest
from k3ray.workers.expert_owners import ExpertGroup
from k3ray.workers.expert_reader import expert_slot_bytes
from k3ray.workers.model.config import ModelConfig

DISK, KERNELS, NETWORK, UNKNOWN = "disk", "memory and kernels", "network", "not known"
TRIP_S = 1.6e-3  # one call between actors and its answer, as Ray carries it: DESIGN.md measured it with 28 KB
NETWORK_BYTES_S = 1.25e9  # ten gigabits, where nothing else is known
KERNEL_RATIO = 2.0  # bytes of trunk for a byte of experts in the same time, where nothing was measured


@dataclass(frozen=True, slots=True)
class Prediction:
    """One token. The bytes are of all nodes together; expert_bytes: routed evenly, the share of experts that no slot
    holds; expert_bytes_at_most: if no slot ever helped. The seconds are None where a speed that matters is not known.
    """

    trunk_bytes: int
    expert_bytes: int
    expert_bytes_at_most: int
    network_bytes: int
    trips: int
    disk_s: float | None
    kernels_s: float | None
    network_s: float

    @property
    def read_bytes(self) -> int:
        """What a token reads from all disks."""
        return self.trunk_bytes + self.expert_bytes

    @property
    def seconds(self) -> float | None:
        """Of a token."""
        if self.disk_s is None or self.kernels_s is None:
            return None
        return self.disk_s + self.kernels_s + self.network_s

    @property
    def tokens_per_s(self) -> float | None:
        """Of one sequence."""
        return None if self.seconds is None else 1 / self.seconds

    @property
    def dominated_by(self) -> str:
        """The longest term."""
        if self.disk_s is None or self.kernels_s is None:
            return UNKNOWN
        terms = {DISK: self.disk_s, KERNELS: self.kernels_s, NETWORK: self.network_s}
        return max(terms, key=terms.__getitem__)


class _Terms:
    """Seconds so far by what they are spent on; a speed that is not known makes the sum unknown."""

    def __init__(self) -> None:
        self.seconds = {DISK: 0.0, KERNELS: 0.0}
        self.known = True

    def add(self, term: str, seconds: float | None) -> None:
        """Add to a term; None: a speed that is not known."""
        self.known &= seconds is not None
        self.seconds[term] += seconds or 0.0

    def add_slower(self, read_s: float | None, kernels_s: float | None) -> None:
        """Reading and computing at once: the slower one counts."""
        if read_s is None or kernels_s is None:
            self.known = False
        else:
            self.add(DISK if read_s > kernels_s else KERNELS, max(read_s, kernels_s))


@dataclass(frozen=True, slots=True)
class ActorShare:
    """One actor: its seat, its threads of it, how the seat's memory is divided, and what it got of that."""

    seat: Seat
    threads: int
    division: Division
    budget: ActorBudget


def predict(
    costs: LayerCosts, stages: Sequence[ActorShare], shards: Sequence[ActorShare], groups: Sequence[ExpertGroup]
) -> Prediction:
    """Foretell a token. stages, shards: their seats, threads and shares, in order."""
    config, terms = costs.config, _Terms()
    expert, top_k = memory_parts.expert_bytes(config), config.num_experts_per_token
    for stage in stages:
        _add_trunk(terms, costs, stage)
    missing = _missing_bytes(config, shards or stages)
    lacking = any(owner.budget.owned_experts > owner.budget.cache_slots for owner in shards or stages)
    if shards:
        _add_sharded(terms, config, shards, groups)
    else:
        _add_own_experts(terms, config, stages)
    sent, trips, network_s = _network(costs, stages, shards, groups)
    return Prediction(
        trunk_bytes=sum(stage.budget.streamed_bytes for stage in stages),
        expert_bytes=missing * top_k * expert // (config.num_experts * expert_slot_bytes(config)),
        expert_bytes_at_most=len(config.moe_layers) * top_k * expert if lacking else 0,
        network_bytes=sent,
        trips=trips,
        disk_s=terms.seconds[DISK] if terms.known else None,
        kernels_s=terms.seconds[KERNELS] if terms.known else None,
        network_s=network_s,
    )


def stage_thread_share(costs: LayerCosts, seats: Sequence[Seat], num_shards: int) -> float:
    """The share of a seat's threads that its stage gets beside a shard: the one after which a token is shortest.

    With a seconds of trunk and b of experts, both by all threads, a / share + b / (1 - share) is least at
    sqrt(a) / (sqrt(a) + sqrt(b)).
    """
    config = costs.config
    seat = seats[0]
    ratio = KERNEL_RATIO
    if seat.speeds.trunk and seat.speeds.experts:
        ratio = seat.speeds.trunk / seat.speeds.experts
    trunk = costs.trunk_bytes(0, config.num_hidden_layers)
    even = ((1 / max(1, num_shards), 1.0),) * max(1, num_shards)
    asked = expected_longest(even, config.num_experts_per_token) * len(config.moe_layers)
    experts = ratio * asked * memory_parts.expert_bytes(config)
    return sqrt(trunk) / (sqrt(trunk) + sqrt(experts))


def _missing_bytes(config: ModelConfig, owners: Sequence[ActorShare]) -> int:
    """Bytes of slots that the experts lack, what is left of a slot on one seat set against another's lack."""
    slot = expert_slot_bytes(config)
    lacking = (owner.budget.owned_experts * slot - owner.division.expert_bytes for owner in owners)
    return max(0, sum(max(1 - slot, nbytes) for nbytes in lacking))


def _add_trunk(terms: _Terms, costs: LayerCosts, stage: ActorShare) -> None:
    """All matrices from memory while those that do not stay there are read: the pinned ones lie between them."""
    division, speeds = stage.division, stage.seat.speeds
    rate, first, stop = _rate(speeds.trunk, stage), division.first, division.stop
    streamed = division.streamed_bytes
    read_s = _seconds(streamed, speeds.disk_chunks) if streamed else 0.0
    terms.add_slower(read_s, _seconds(costs.trunk_bytes(first, stop) + costs.state_bytes(first, stop), rate))


def _add_sharded(
    terms: _Terms, config: ModelConfig, shards: Sequence[ActorShare], groups: Sequence[ExpertGroup]
) -> None:
    """The layers' experts by all shards at once."""
    each = [_an_expert(config, shard, shard.seat.disk_sharers) for shard in shards]
    for group in groups:
        total, parts, reading = sum(group.counts), [], 0.0
        for count, (read_s, kernels_s) in zip(group.counts, each, strict=True):
            if not count:
                continue
            if read_s is None or kernels_s is None:
                terms.known = False
                continue
            parts.append((count / total, max(read_s, kernels_s)))
            reading += count * (read_s - kernels_s)
        longest = expected_longest(tuple(sorted(parts)), config.num_experts_per_token) if parts else 0.0
        terms.add(DISK if reading > 0 else KERNELS, len(group.layers) * longest)


def _add_own_experts(terms: _Terms, config: ModelConfig, stages: Sequence[ActorShare]) -> None:
    """Each stage's layers by itself."""
    for stage in stages:
        asked = sum(config.is_moe(layer) for layer in range(stage.division.first, stage.division.stop))
        asked *= config.num_experts_per_token
        if asked:
            read_s, kernels_s = _an_expert(config, stage, 1)
            terms.add_slower(
                None if read_s is None else asked * read_s, None if kernels_s is None else asked * kernels_s
            )


def _an_expert(config: ModelConfig, actor: ActorShare, sharers: int) -> tuple[float | None, float | None]:
    """(seconds of reading, of computing) for one expert of an actor, its slots taken into account."""
    nbytes, owned = memory_parts.expert_bytes(config), actor.budget.owned_experts
    share = (owned - actor.budget.cache_slots) / owned if owned else 0.0
    disk = actor.seat.speeds.disk_experts
    read_s = 0.0 if not share else _seconds(share * nbytes, None if disk is None else disk / sharers)
    return read_s, _seconds(nbytes, _rate(actor.seat.speeds.experts, actor))


def _network(
    costs: LayerCosts, stages: Sequence[ActorShare], shards: Sequence[ActorShare], groups: Sequence[ExpertGroup]
) -> tuple[int, int, float]:
    """(bytes that leave a node, calls one after the other, their seconds) of a token.

    A frame from stage to stage, logits to the driver, and for each MoE layer a latent to every shard that is asked
    and one back for each expert. Every call counts its fixed time, on one node too, for Ray carries it there as well.
    """
    config = costs.config
    latent = 4 * config.routed_expert_hidden_size
    sent, trips, transfer = 0.0, 1, 0.0
    for stage, following in zip(stages, [*stages[1:], None], strict=True):
        seat, division = stage.seat, stage.division
        away = not seat.driver if following is None else seat.node != following.seat.node
        nbytes = 4 * config.vocab_size
        if following is not None:
            trips, nbytes = trips + 1, memory_parts.frame_bytes(config, division.stop, 1)
        sent, transfer = sent + away * nbytes, transfer + away * nbytes / _link(seat)
        for group in groups if shards else ():
            layers = sum(division.first <= layer < division.stop for layer in group.layers)
            trips += layers
            for shard, count in zip(shards, group.counts, strict=True):
                if shard.seat.node != seat.node and count:
                    share, draws = count / sum(group.counts), config.num_experts_per_token
                    asked = 1 - (1 - share) ** draws
                    nbytes_s = layers * latent * (asked + draws * share)
                    sent, transfer = sent + nbytes_s, transfer + nbytes_s / _link(seat)
    return round(sent), trips, trips * TRIP_S + transfer


def _link(seat: Seat) -> float:
    return seat.speeds.network or NETWORK_BYTES_S


def _rate(rate: float | None, actor: ActorShare) -> float | None:
    """An actor's share of its seat's speed."""
    return None if rate is None else rate * min(1.0, actor.threads / actor.seat.threads)


def _seconds(nbytes: float, rate: float | None) -> float | None:
    return None if rate is None else nbytes / rate
