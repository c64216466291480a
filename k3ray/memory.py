"""The memory of a run: what was wished for, divided by the budget, and put into the plan of its processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from k3ray.cluster.budget import plan_budget
from k3ray.cluster.budget_plan import BudgetPlan, host_run
from k3ray.cluster.machine import MemoryLimits, memory_limits
from k3ray.cluster.plan import Plan, with_memory
from k3ray.cluster.wishes import Wishes
from k3ray.workers.loading import Checkpoint, TapeSpec
from k3ray.workers.tape.identity import changed_since
from k3ray.workers.tape.layout import TapeLayout
from k3ray.workers.tape.tape import open_tape


@dataclass(frozen=True, slots=True)
class TapeChoice:
    """A tape that was proven to be of the model, and its layout."""

    folder: Path
    layout: TapeLayout


@dataclass(frozen=True, slots=True)
class MemoryWish:
    """What a model is opened with. context: positions to plan for; None: those of the first generation."""

    tape: TapeChoice | None
    wishes: Wishes
    context: int | None


def choose_tape(checkpoint: Checkpoint, folder: Path, say: Callable[[str], None] = lambda line: None) -> TapeChoice:
    """Open the tape and prove that it is this model's, for all layers; TapeError, WrongTape, DiskReadFailure.

    say: is told when the tape's disk refuses reads past the page cache, and of shards that are newer than the tape.
    """
    layers = range(checkpoint.binding.config.num_hidden_layers + 1)
    with (tape := open_tape(folder, checkpoint.binding, checkpoint.reader, layers, say)).file:
        if changed := changed_since(folder, checkpoint.reader.index):
            say(f"warning: {changed}")
        return TapeChoice(folder, tape.layout)


def plan_memory(
    checkpoint: Checkpoint,
    plan: Plan,
    wish: MemoryWish,
    positions: int,
    starts_ray: bool,
    limits: MemoryLimits | None = None,
) -> tuple[Plan, BudgetPlan]:
    """Return the plan with every process's part of the budget; MemoryFailure when it cannot hold.

    positions: prompt and generated tokens of the longest sequence. starts_ray: whether Ray's daemons are ours.
    limits: of this host; None: what it has by itself.
    """
    tape = wish.tape
    run = host_run(checkpoint.config, plan, tape.layout if tape is not None else None, positions, starts_ray)
    budget = plan_budget(run, wish.wishes, limits or memory_limits())
    stages = [
        (TapeSpec(tape.folder, part.pinned_chunks, part.ring_chunks) if tape is not None else None, part.cache_slots)
        for part in budget.stages
    ]
    return with_memory(plan, stages, [part.cache_slots for part in budget.shards]), budget


def declared_on(node_id: str, plan: Plan, budget: BudgetPlan) -> Plan:
    """Return the plan of one host with what Ray is to be told: each process's node and bytes."""
    return Plan(
        tuple(
            replace(stage, node_id=node_id, memory_bytes=part.total_bytes)
            for stage, part in zip(plan.stages, budget.stages, strict=True)
        ),
        tuple(
            replace(shard, node_id=node_id, memory_bytes=part.total_bytes)
            for shard, part in zip(plan.shards, budget.shards, strict=True)
        ),
    )
