"""The records of a memory plan: what a host runs, what each of its processes gets, and what a token reads then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from k3ray.cluster import memory_parts
from k3ray.cluster.plan import Plan
from k3ray.workers.expert_owners import shard_of
from k3ray.workers.frames import STEP_TOKENS
from k3ray.workers.model.config import ModelConfig
from k3ray.workers.tape.layout import TapeLayout
from k3ray.workers.tape.residency import DEFAULT_RING_CHUNKS

PINNED, RING, COPY = "trunk in memory", "tape ring", "matrix in one piece"
EXPERTS = "expert slots"


@dataclass(frozen=True, slots=True)
class HostRun:
    """What one host is to run.

    layout: of the tape; None without one: then the whole trunk is held. cuts: 0, first layer of every further stage,
    number of layers. threads: of the stage that has most. positions: of the one sequence, prompt and generated tokens.
    """

    config: ModelConfig
    layout: TapeLayout | None
    cuts: tuple[int, ...]
    num_shards: int
    threads: int
    positions: int
    starts_ray: bool = True
    ring_chunks: int = DEFAULT_RING_CHUNKS

    @property
    def num_stages(self) -> int:
        """How many stages share the layers."""
        return len(self.cuts) - 1

    @property
    def step_tokens(self) -> int:
        """The most tokens of one step."""
        return min(STEP_TOKENS, self.positions)

    def layers(self, stage: int) -> range:
        """The layers of a stage."""
        return range(self.cuts[stage], self.cuts[stage + 1])

    def has_head(self, stage: int) -> bool:
        """Whether the stage's part of the tape ends with the head."""
        return stage == self.num_stages - 1

    @property
    def stage_chunks(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of every stage's chunks of the tape; empty without one."""
        if self.layout is None:
            return ((),) * self.num_stages
        cuts = zip(self.cuts[:-1], self.cuts[1:], strict=True)
        return tuple(
            self.layout.chunks_of(first, stop, self.has_head(stage)) for stage, (first, stop) in enumerate(cuts)
        )

    def moe_layers(self, stage: int) -> int:
        """How many of a stage's layers route."""
        return sum(self.config.is_moe(layer) for layer in self.layers(stage))

    @property
    def owned_experts(self) -> tuple[int, ...]:
        """How many routed experts every owner has: every shard, or every stage where there are no shards."""
        experts = self.config.num_experts
        if not self.num_shards:
            return tuple(self.moe_layers(stage) * experts for stage in range(self.num_stages))
        counts = [sum(shard_of(expert, self.num_shards) == shard for expert in range(experts))
                  for shard in range(self.num_shards)]  # fmt: skip
        return tuple(len(self.config.moe_layers) * count for count in counts)


def host_run(
    config: ModelConfig, plan: Plan, layout: TapeLayout | None, positions: int, starts_ray: bool = True
) -> HostRun:
    """What the plan's host runs. config: cut to the layers that are run, as the plan is."""
    cuts = (0, *(stage.stop for stage in plan.stages))
    threads = max(stage.threads for stage in plan.stages)
    return HostRun(config, layout, cuts, len(plan.shards), threads, positions, starts_ray)


@dataclass(frozen=True, slots=True)
class ActorBudget:
    """One process. The first pinned_chunks of a stage's chunks stay in memory, the others pass through ring_chunks
    buffers once a step: streamed_bytes. cache_slots: experts that find room at a time, of owned_experts.
    parts: bytes by what they are for.
    """

    name: str
    pinned_chunks: int
    ring_chunks: int
    streamed_bytes: int
    cache_slots: int
    owned_experts: int
    parts: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        """Everything of this process."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class BudgetPlan:
    """All processes of a host. host_parts: what is there once. limit_bytes: what the plan had to fit into, because of
    limit_said. trunk_bytes: the tape's, or the matrices' without one; cache_bytes: of one slot for every expert.
    """

    limit_bytes: int
    limit_said: str
    host_parts: Mapping[str, int]
    stages: tuple[ActorBudget, ...]
    shards: tuple[ActorBudget, ...]
    trunk_bytes: int
    trunk_bytes_per_token: int  # exactly
    expert_bytes_per_token: int  # at most: what a cache that keeps nothing useful reads

    @property
    def total_bytes(self) -> int:
        """Everything of all processes."""
        return sum(self.host_parts.values()) + sum(actor.total_bytes for actor in (*self.stages, *self.shards))

    @property
    def bytes_per_token(self) -> int:
        """What a token reads from the disk, at most."""
        return self.trunk_bytes_per_token + self.expert_bytes_per_token

    @property
    def cache_slots(self) -> int:
        """Expert slots of all processes."""
        return sum(actor.cache_slots for actor in (*self.stages, *self.shards))

    @property
    def owned_experts(self) -> int:
        """Routed experts of all processes."""
        return sum(actor.owned_experts for actor in (*self.stages, *self.shards))

    def parts(self) -> dict[str, int]:
        """Bytes by what they are for, over all processes."""
        total = dict(self.host_parts)
        for actor in (*self.stages, *self.shards):
            for name, nbytes in actor.parts.items():
                total[name] = total.get(name, 0) + nbytes
        return total

    def describe(self) -> str:
        """One line before a run."""
        parts = self.parts()
        trunk = f"{gigabytes(parts.get(PINNED, 0))} of {gigabytes(self.trunk_bytes)} of trunk in memory"
        cache = gigabytes(parts.get(EXPERTS, 0))
        experts = f"room for {self.cache_slots:,} of {self.owned_experts:,} experts ({cache})"
        reads = (
            f"a token reads {gigabytes(self.trunk_bytes_per_token)} of trunk and at most "
            f"{gigabytes(self.expert_bytes_per_token)} of experts"
        )
        return (
            f"memory: {gigabytes(self.total_bytes)} planned of {gigabytes(self.limit_bytes)} ({self.limit_said}); "
            f"{trunk}, {experts}; {reads if self.bytes_per_token else 'no byte is read twice'}"
        )


def fixed_parts(run: HostRun) -> tuple[dict[str, int], list[dict[str, int]], list[dict[str, int]]]:
    """What is needed whatever the budget: once on the host, by stage, by shard. Bytes by what they are for."""
    config, tokens, remote = run.config, run.step_tokens, run.num_shards > 0
    host = {
        "libraries, once": memory_parts.LIBRARY_BYTES,
        **({"Ray's daemons": memory_parts.RAY_BYTES} if run.starts_ray else {}),
        "driver": memory_parts.DRIVER_BYTES + (memory_parts.VOCABULARY_BYTES + 16) * config.vocab_size,
        "index of the tensors": memory_parts.index_bytes(config),
        "messages under way": memory_parts.message_bytes(config, run.cuts, tokens, remote),
    }
    stages = []
    for stage in range(run.num_stages):
        layers = run.layers(stage)
        stages.append({
            "process": memory_parts.ACTOR_BYTES,
            "small tensors": memory_parts.small_tensor_bytes(config, layers),
            "state and latents": memory_parts.state_bytes(config, layers, run.positions),
            "activations": memory_parts.stage_working_bytes(config, layers, tokens, run.positions, run.threads),
        })  # fmt: skip
    shard = {"process": memory_parts.ACTOR_BYTES, "activations": memory_parts.shard_working_bytes(config, tokens)}
    return host, stages, [dict(shard) for _ in range(run.num_shards)]


def gigabytes(nbytes: int) -> str:
    """Bytes as decimal gigabytes, or megabytes where these say more."""
    if nbytes >= 95_000_000:
        return f"{nbytes / 1e9:,.2f} GB"
    return f"{nbytes / 1e6:,.1f} MB" if nbytes else "0"
