"""Starting a run: memory planned, Ray joined or started, the actors started and loaded, on one host or on several."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from k3ray.cluster.actor_calls import ActorId, all_actors
from k3ray.cluster.actor_chain import ActorChain
from k3ray.cluster.actor_peaks import HURRIED_PEAK_S, PEAK_S, peak_memory
from k3ray.cluster.budget_plan import BudgetPlan, gigabytes
from k3ray.cluster.living_nodes import LivingNodes, PlacedRun
from k3ray.cluster.machine import is_in_memory
from k3ray.cluster.memory_parts import state_bytes
from k3ray.cluster.placed_budget import PlacedBudget
from k3ray.cluster.plan import Plan
from k3ray.cluster.processes import ProcessMemory
from k3ray.cluster.ray_join import chosen_address
from k3ray.cluster.ray_memory import hold_memory, limits_within_ray
from k3ray.cluster.ray_runtime import RayRuntime, RaySettings, ray_runtime
from k3ray.cluster.ray_view import RayView
from k3ray.cluster.recovering_chain import RecoveringChain
from k3ray.cluster.recovery_plan import RecoverySettings
from k3ray.cluster.seat_costs import LayerCosts
from k3ray.cluster_report import MessageReport, NodeReport, message_report, node_reports
from k3ray.environment import read_environment
from k3ray.kernels.compile import cache_directory
from k3ray.memory import MemoryWish, declared_on, plan_memory
from k3ray.placing import ClusterWish, Placed, place_run
from k3ray.report import Settings
from k3ray.workers.loading import Checkpoint, CheckpointSpec, open_checkpoint
from k3ray.workers.message_counts import MessageCounts
from k3ray.workers.process_report import ProcessReport
from k3ray.workers.specs import part_name

Say = Callable[[str], None]
SMALL_BYTES = 100_000_000  # of temporary files, not worth a word


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What is to be started. plan: for one host. spec: the model as the command's host has it.

    threads: of the node that the command runs on. address: of RAY_ADDRESS.
    """

    spec: CheckpointSpec
    checkpoint: Checkpoint
    plan: Plan
    memory: MemoryWish
    cluster: ClusterWish
    recovery: RecoverySettings
    threads: int
    address: str | None


@dataclass(frozen=True, slots=True)
class Run:
    """What was started. placed: where on a cluster; None on one host. memory: of this host's processes."""

    plan: Plan
    budget: BudgetPlan | PlacedBudget
    placed: Placed | None
    runtime: RayRuntime
    memory: ProcessMemory
    actors: ActorChain
    chain: RecoveringChain
    homes: LivingNodes | None  # None: all actors are on this host

    def settings(self, asked: Settings) -> Settings:
        """What was asked for, with the stages, shards and threads that run."""
        threads = sum(actor.threads for actor in self.plan.actors) if self.placed is not None else asked.threads
        return replace(asked, stages=len(self.plan.stages), expert_shards=len(self.plan.shards), threads=threads)

    def node_reports(self, far_peaks: Mapping[str, int]) -> tuple[NodeReport, ...]:
        """Of the nodes of a cluster; none on one host. far_peaks: see there."""
        if self.placed is None:
            return ()
        here, placement = self.memory.peak_bytes, self.placed.placement
        planned = {actor.budget.name: actor.budget.total_bytes for actor in (*placement.stages, *placement.shards)}
        for spec in map(self.actors.spec_of, all_actors(self.actors)):
            if spec.memory_bytes is not None:  # a part that went to another node may hold less there
                planned[part_name(spec)] = spec.memory_bytes
        return node_reports(placement, self._nodes_now(), self._own_node, here, far_peaks, planned)

    def message_report(self, counts: MessageCounts) -> MessageReport:
        """What went between the actors, and of it between nodes."""
        return message_report(counts, [part_name(stage) for stage in self.plan.stages])

    def _nodes_now(self) -> dict[str, str]:
        """The name of the node that each part is on: another than the plan's after a node was lost."""
        name_of = self.homes.name_of if self.homes is not None else lambda actor: self._own_node
        return {self.actors.part_of(actor): name_of(actor) for actor in all_actors(self.actors)}

    def peaks(self, far_peaks: Mapping[str, int]) -> dict[str, int]:
        """Bytes by process: those of this host at one moment, of actors elsewhere what each held at most."""
        return {**far_peaks, **self.memory.peak.role_bytes}

    def far_peaks(self, whole: bool = True) -> dict[str, int]:
        """What the actors of a cluster say that they held at most; asked once, as one that cannot be reached is waited
        for. whole: False where the run was interrupted or has failed, and nobody may be kept waiting.
        """
        if self.placed is None:
            return {}
        return peak_memory(self.actors, PEAK_S if whole else HURRIED_PEAK_S)

    def unanswered(self, far_peaks: Mapping[str, int]) -> str:
        """A line on the actors of a cluster of which nothing was heard at the end; empty where all have answered."""
        parts = map(self.actors.part_of, all_actors(self.actors)) if self.placed is not None else ()
        silent = ", ".join(part for part in parts if part not in far_peaks)
        return silent and (
            f"no answer from {silent}: where such a process still is, Ray ends it in some seconds, or when its node is "
            "reached again"
        )

    @property
    def _own_node(self) -> str:
        """This node's name; on one host nothing."""
        nodes = self.placed.nodes if self.placed is not None else ()
        return next((node.name for node in nodes if node.driver), "")


def start_run(request: RunRequest, positions: int, running: ExitStack, say: Say) -> Run:
    """Plan, connect, start and load; what was started ends with `running`. Raises a Failure.

    positions: of the longest sequence. On one host the memory is planned before Ray is started, so that a wish that
    cannot hold is refused at once; a cluster's nodes are known only when it is joined.
    """
    joined = chosen_address(request.address) is not None
    runtime = _connect(request, 1, running, say) if joined else None
    placed = None
    if request.cluster.forced or (runtime is not None and runtime.num_nodes > 1):
        config = request.checkpoint.config
        spec = CheckpointSpec(
            request.spec.model_dir, None, config.num_hidden_layers, config=request.checkpoint.binding.config
        )
        placed = place_run(request.cluster, config, spec, positions, request.threads, joined, say)
        plan: Plan = placed.plan
        budget: BudgetPlan | PlacedBudget = placed.budget
    else:
        whole = open_checkpoint(request.spec) if request.checkpoint.partial else request.checkpoint
        limits = limits_within_ray(runtime.node_id) if runtime is not None else None
        plan, own = plan_memory(whole, request.plan, request.memory, positions, not joined, limits)
        if runtime is not None:
            plan = declared_on(runtime.node_id, plan, own)
        budget = own
    say(budget.describe())
    for line in kept_in_memory(request, positions):
        say(line)
    if runtime is None:
        runtime = _connect(request, plan.num_processes, running, say)
    else:
        _hold_shared(budget, runtime, placed)
    memory, actors, watch = _start(plan, runtime, placed, running, say)
    homes = _homes(request, placed, runtime, actors) if placed is not None and not runtime.started else None

    def replaced(actor: ActorId, report: ProcessReport) -> None:
        watch(actor, report)
        say(f"lost and loaded again: {actors.part_of(actor)}")

    chain = RecoveringChain(actors, request.recovery, replaced, homes)
    return Run(plan, budget, placed, runtime, memory, actors, chain, homes)


def kept_in_memory(request: RunRequest, positions: int) -> Iterator[str]:
    """Lines where what is kept for a recovery has too little room, or takes memory that no plan counts.

    The state of one sequence of `positions`, twice while a new snapshot arrives, and the messages since.
    """
    config, folder = request.checkpoint.config, Path(tempfile.gettempdir())
    state = state_bytes(config, range(config.num_hidden_layers), positions)
    nbytes = request.recovery.log_bytes + (2 * state if request.recovery.snapshot_every else 0)
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        yield (
            f"{folder} has {gigabytes(free)} free, and up to {gigabytes(nbytes)} of snapshots and messages are kept "
            "there: what does not fit is kept in memory, or run again after a loss; name a larger folder in TMPDIR"
        )
    if nbytes > SMALL_BYTES and is_in_memory(folder):
        yield (
            f"{folder} is in memory, and up to {gigabytes(nbytes)} of snapshots and messages that are kept there are "
            "not in the plan: name a folder on a disk in TMPDIR"
        )


def kernels_compiled() -> bool:
    """Whether an earlier run left this version's machine code on this host, which its actors need not make again."""
    folder = cache_directory()
    return folder is not None and next(folder.rglob("*.nbc"), None) is not None


def _connect(request: RunRequest, workers: int, running: ExitStack, say: Say) -> RayRuntime:
    runtime = running.enter_context(ray_runtime(RaySettings(request.address, workers=workers)))
    say(runtime.describe())
    return runtime


def _hold_shared(own: BudgetPlan | PlacedBudget, runtime: RayRuntime, placed: Placed | None) -> None:
    """Tell Ray of what no actor takes, the driver and what is on a node once. own: of this host, where placed is None.

    Raises MemoryTaken.
    """
    if placed is not None:
        hold_memory(placed.once_bytes, placed.node_names.__getitem__)
    elif isinstance(own, BudgetPlan):
        hold_memory({runtime.node_id: sum(own.host_parts.values())})


def _start(
    plan: Plan, runtime: RayRuntime, placed: Placed | None, running: ExitStack, say: Say
) -> tuple[ProcessMemory, ActorChain, Callable[[ActorId, ProcessReport], None]]:
    """Start and load the actors; returns them, and what is to hear of each new process."""
    memory = running.enter_context(ProcessMemory({os.getpid(): "driver", **runtime.daemon_pids()}))
    names = placed.node_names if placed is not None else None
    actors = ActorChain(plan, runtime.actor_options, names, read_environment().ports)
    running.callback(actors.stop)

    def watch(actor: ActorId, report: ProcessReport) -> None:
        if actors.spec_of(actor).node_id in (None, runtime.node_id):  # a number of another host is another process here
            memory.watch(report.pid, actors.part_of(actor))
        if report.note:
            say(f"{actors.part_of(actor)}: {report.note}")

    if not kernels_compiled():
        say("compiling the kernels, once for this machine, for up to a minute")
    actors.load(loaded=lambda part: say(f"loaded: {part}"))
    for actor, report in actors.loaded_reports():
        watch(actor, report)
    return memory, actors, watch


def _homes(request: RunRequest, placed: Placed, runtime: RayRuntime, actors: ActorChain) -> LivingNodes:
    """Where actors live, and where they may go when a node is lost."""
    run = PlacedRun(
        placed.placement,
        placed.nodes,
        LayerCosts(request.checkpoint.config, placed.layout, placed.placement.positions),
    )
    return LivingNodes(actors, run, RayView(runtime.address, request.cluster.roots, placed.nodes))
