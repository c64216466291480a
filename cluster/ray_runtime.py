"""Ray for one run: joined where a cluster is given or announced on this machine, else a private one of our own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from k3ray.cluster.ray_driver import RayFailure, silent_ray
from k3ray.cluster.ray_join import chosen_address, examine, joined_ray
from k3ray.cluster.ray_private import private_ray
from k3ray.cluster.signals import ignored_signals, unwinding_signals
from k3ray.workers.counted import counted

MIB = 1 << 20
STORE_BYTES = 200 * MIB


@dataclass(frozen=True, slots=True)
class RaySettings:
    """Which Ray to use."""

    address: str | None = None  # HOST:PORT to join; "local": a private one; None or "auto": one announced here, if any
    workers: int = 1  # how many actors will be started: a private Ray starts their processes ahead
    store_bytes: int = STORE_BYTES  # of a private Ray's object store; less where /dev/shm is smaller


@dataclass(frozen=True, slots=True)
class RayRuntime:
    """The Ray that this process drives. Only `ray_runtime` makes one."""

    started: bool  # True: ours alone, gone at the end
    address: str  # of the cluster that was joined; empty where `started`
    description: str
    daemons: Mapping[int, str] = field(default_factory=dict)
    num_nodes: int = 1  # that lived when it was joined

    @property
    def node_id(self) -> str:
        """Ray's id of the node that this process runs on."""
        return str(ray.get_runtime_context().get_node_id())

    def describe(self) -> str:
        """One line: which Ray this is."""
        return self.description

    def daemon_pids(self) -> dict[int, str]:
        """Ray's own processes that we have started, by role; their children are the actors. Empty where joined."""
        return dict(self.daemons)

    def actor_options(
        self, num_cpus: float, memory_bytes: int | None, name: str, node_id: str | None = None
    ) -> dict[str, Any]:
        """Options for `Class.options(**...)` of one actor, for placement where the plan has decided.

        A joined cluster is told what the actor takes, so that the jobs of others keep away from it; Ray then waits in
        silence for a node that has as much. A private Ray counts nothing, so it never waits. Threads and environment
        are left alone: the actor's own pools decide (Ray sets OMP_NUM_THREADS only where the user has not). The actor
        is bound to the node that the plan has looked at, or, with none named, to this driver's, and to no other.
        """
        options: dict[str, Any] = {"name": name, "num_cpus": 0 if self.started else num_cpus, "num_gpus": 0}
        if memory_bytes is not None and not self.started:
            options["memory"] = memory_bytes
        if not self.started:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id or self.node_id, soft=False)
        return {**options, "max_restarts": 0, "max_task_retries": 0}


@contextmanager
def ray_runtime(settings: RaySettings) -> Iterator[RayRuntime]:
    """Connects this process to Ray, and leaves nothing behind: no process, no file, no changed setting.

    That holds for an exception, Ctrl-C, SIGTERM and SIGHUP, which unwind the stack; after a SIGKILL a guardian cleans
    up within seconds. Raises RayFailure where Ray cannot be started or joined.
    """
    with unwinding_signals(), silent_ray(), ExitStack() as ending, ExitStack() as running:
        runtime = _enter(settings, running)
        try:
            yield runtime
        finally:
            ending.enter_context(ignored_signals())


def _enter(settings: RaySettings, running: ExitStack) -> RayRuntime:
    if ray.is_initialized():
        raise RayFailure(
            "this process is connected to Ray already, and one process can be so once: ray.shutdown() first"
        )
    address = chosen_address(settings.address)
    if address is None:
        own = running.enter_context(private_ray(settings.workers, settings.store_bytes))
        store = f"{own.settings.store_bytes // MIB} MB object store in {own.settings.store_directory}"
        slow = "" if own.slow_reason is None else f"; started slowly, with all its helpers: {own.slow_reason}"
        return RayRuntime(True, "", f"Ray: started its own, {store}{slow}", own.daemons)
    cluster = examine(address)
    running.enter_context(joined_ray(cluster))
    said = f"Ray: joined the cluster at {address}, {counted(cluster.nodes, 'node')}"
    return RayRuntime(False, cluster.address, said, num_nodes=cluster.nodes)
