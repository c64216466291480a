"""What a token after the prompt should cost under a placement: bytes, seconds, and the term that dominates.

Each stage has its turn (token_time.py has the formula): its trunk and states at the speed of the engine's layers; per
MoE layer the slowest shard, by the exact expectation of the most that evenly routed experts ask of one, while the stage
computes its shared experts; per trip a fixed time and the network. docs/cluster.md explains each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt

from k3ray.cluster import memory_parts
from k3ray.cluster.budget_plan import ActorBudget
from k3ray.cluster.kernel_rates import rate_of, rate_together
from k3ray.cluster.layer_cuts import Division
from k3ray.cluster.message_sizes import token_ways
from k3ray.cluster.seat_costs import LayerCosts
from k3ray.cluster.seats import Seat
from k3ray.cluster.slowest_shard import expected_longest
from k3ray.cluster.token_time import Turn, token_time
from k3ray.cluster.trip_times import between_stages
from k3ray.workers.expert_owners import ExpertGroup
from k3ray.workers.expert_reader import expert_slot_bytes
from k3ray.workers.model.config import ModelConfig

DISK, KERNELS, NETWORK, UNKNOWN = "disk", "memory and kernels", "network", "not known"
KERNEL_RATIO = 2.0  # bytes of trunk for a byte of experts in the same time, where nothing was measured


@dataclass(frozen=True, slots=True)
class Prediction:
    """One token. The bytes are of all nodes together; expert_bytes: routed evenly, the share of experts that no slot
    holds; expert_bytes_at_most: if no slot ever helped. network_bytes: of way_bytes, what leaves a node; way_bytes: of
    all messages by "sender > receiver", as message_sizes.py has them. The seconds are None where a speed that matters
    is not known.
    """

    trunk_bytes: int
    expert_bytes: int
    expert_bytes_at_most: int
    network_bytes: int
    trips: int
    disk_s: float | None
    kernels_s: float | None
    network_s: float
    way_bytes: Mapping[str, int] = field(default_factory=dict)

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


@dataclass(frozen=True, slots=True)
class ActorShare:
    """One actor: its seat, its threads of it, how the seat's memory is divided, and what it got of that."""

    seat: Seat
    threads: int
    division: Division
    budget: ActorBudget


@dataclass(frozen=True, slots=True)
class _Experts:
    """Routed experts in one stage's turn; see Turn."""

    seconds: float = 0.0
    wait: bool = False
    read_s: float = 0.0
    shared_s: float = 0.0  # of the stage's trunk, what goes on meanwhile and is in seconds


def predict(
    costs: LayerCosts, stages: Sequence[ActorShare], shards: Sequence[ActorShare], groups: Sequence[ExpertGroup]
) -> Prediction:
    """Foretell a token. stages, shards: their seats, threads and shares, in order."""
    config = costs.config
    expert, top_k = memory_parts.expert_bytes(config), config.num_experts_per_token
    missing = _missing_bytes(config, shards or stages)
    lacking = any(owner.budget.owned_experts > owner.budget.cache_slots for owner in shards or stages)
    runs = [(stage.division.first, stage.division.stop) for stage in stages]
    ways = token_ways(config, runs, groups, len(shards))
    between = between_stages(
        [(stage.seat, run) for stage, run in zip(stages, runs, strict=True)],
        [shard.seat for shard in shards],
        groups,
        ways,
    )
    turns = [_turn(costs, stage, shards, groups) for stage in stages]
    known = [turn for turn in turns if turn is not None]
    time = token_time(known, between.seconds) if len(known) == len(turns) else None
    return Prediction(
        trunk_bytes=sum(stage.budget.streamed_bytes for stage in stages),
        expert_bytes=missing * top_k * expert // (config.num_experts * expert_slot_bytes(config)),
        expert_bytes_at_most=len(config.moe_layers) * top_k * expert if lacking else 0,
        network_bytes=between.sent_bytes,
        trips=between.trips,
        disk_s=None if time is None else time.disk_s,
        kernels_s=None if time is None else time.kernels_s,
        network_s=between.seconds,
        way_bytes=ways,
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


def _turn(
    costs: LayerCosts, stage: ActorShare, shards: Sequence[ActorShare], groups: Sequence[ExpertGroup]
) -> Turn | None:
    """One stage's turn; None where a speed that matters is not known."""
    division, budget = stage.division, stage.budget
    rate, disk = rate_of("trunk", stage.seat, stage.threads), stage.seat.speeds.disk_chunks
    experts = _sharded(costs.config, stage, shards, groups) if shards else _own_experts(costs.config, stage)
    if rate is None or experts is None or (disk is None and division.streamed_bytes):
        return None
    first, stop = division.first, division.stop
    kernels_s = (costs.trunk_bytes(first, stop) + costs.state_bytes(first, stop)) / rate - experts.shared_s
    streamed_s = division.streamed_bytes / disk if disk else 0.0
    ahead_s = budget.ring_chunks * costs.layout.chunk_bytes / disk if disk else 0.0
    return Turn(
        max(0.0, kernels_s), experts.seconds, experts.wait, streamed_s, experts.read_s, ahead_s, stage.seat.node
    )


def _own_experts(config: ModelConfig, stage: ActorShare) -> _Experts | None:
    """A stage's own routed experts, as they arrive from the disk or lie in memory."""
    layers = sum(config.is_moe(layer) for layer in range(stage.division.first, stage.division.stop))
    if not layers:
        return _Experts()
    asked = layers * config.num_experts_per_token
    read_s, kernels_s = _an_expert(config, stage, rate_of("experts", stage.seat, stage.threads))
    if read_s is None or kernels_s is None:
        return None
    return _Experts(asked * max(read_s, kernels_s), read_s > kernels_s, asked * read_s)


def _sharded(
    config: ModelConfig, stage: ActorShare, shards: Sequence[ActorShare], groups: Sequence[ExpertGroup]
) -> _Experts | None:
    """The experts of a stage's layers by all shards at once, while the stage computes its shared experts."""
    rate = rate_of("trunk", stage.seat, stage.threads)
    if rate is None:
        return None
    shared_s = memory_parts.shared_bytes(config) / rate
    threads = [shard.threads for shard in shards]
    seconds = waiting = read_s = overlapped_s = 0.0
    for group in groups:
        layers = sum(stage.division.first <= layer < stage.division.stop for layer in group.layers)
        if not layers:
            continue
        at_work = [number for number, count in enumerate(group.counts) if count]
        together = sum(threads[number] for number in at_work if shards[number].seat.node == stage.seat.node)
        parts, busy_s, reading = [], shared_s * stage.threads, 0.0
        for number in at_work:
            shard, share = shards[number], group.counts[number] / sum(group.counts)
            here = shard.seat.node == stage.seat.node
            beside = together if here else shard.threads
            each = _an_expert(config, shard, rate_together("experts", shard.seat, shard.threads, beside))
            if each[0] is None or each[1] is None:
                return None
            sharers = shard.seat.disk_sharers
            parts.append((share, max(each[0] * sharers, each[1])))
            reading += share * (each[0] * sharers - each[1])
            asked = share * config.num_experts_per_token
            busy_s += asked * each[1] * shard.threads if here else 0.0
            read_s += layers * asked * each[0] if here else 0.0
        longest = expected_longest(tuple(sorted(parts)), config.num_experts_per_token, shared_s)
        longest = max(longest, busy_s / (stage.seat.node_threads or stage.seat.threads))
        seconds, overlapped_s = seconds + layers * longest, overlapped_s + layers * shared_s
        waiting += reading
    return _Experts(seconds, waiting > 0, read_s, overlapped_s)


def _an_expert(config: ModelConfig, actor: ActorShare, rate: float | None) -> tuple[float | None, float | None]:
    """(seconds of reading, of computing) for one expert of an actor, its slots taken into account."""
    nbytes, owned = memory_parts.expert_bytes(config), actor.budget.owned_experts
    share = (owned - actor.budget.cache_slots) / owned if owned else 0.0
    disk = actor.seat.speeds.disk_experts
    if share and disk is None:
        return None, None
    read_s = share * nbytes / disk if share and disk else 0.0
    return read_s, None if rate is None else nbytes / rate
