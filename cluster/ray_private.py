"""A small Ray of our own on this machine, started for one run and gone with it.

It has a token of its own, answers on the loopback address only, and touches nothing of the user's Ray settings.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import ray

from k3ray.cluster import machine
from k3ray.cluster.processes import children_of, role_of
from k3ray.cluster.ray_directory import RAYS, VARIABLE, session_directory
from k3ray.cluster.ray_driver import authentication, connect, quieten, reason_of, variables
from k3ray.cluster.ray_settings import SYSTEM, WORKER_ENVIRONMENT, PrivateSettings, private_settings
from k3ray.cluster.signals import children_shielded


@dataclass(frozen=True, slots=True)
class PrivateRay:
    """What was started: the daemons by pid, with what settings, and why not the fast way (None: it was)."""

    daemons: Mapping[int, str]
    settings: PrivateSettings
    slow_reason: str | None


@contextmanager
def private_ray(workers: int, store_bytes: int) -> Iterator[PrivateRay]:
    """Starts Ray, connects this process as its driver, and at the end stops both and leaves no trace.

    It has a token that only this run knows, whatever the user's own clusters have. `workers`: how many actors to
    prepare for, each in a process started ahead. Raises RayFailure with Ray's reason.
    """
    quieten()
    with session_directory() as directory, authentication("token", RAY_AUTH_TOKEN=secrets.token_hex(32)):
        machine_bytes = machine.memory_limits().machine_bytes
        settings = private_settings(directory / RAYS, workers, store_bytes, len(machine.affinity()), machine_bytes)
        before = children_of(os.getpid())
        with ExitStack() as running:
            with variables({**WORKER_ENVIRONMENT, VARIABLE: str(directory)}), children_shielded():
                slow_reason = _start(settings, running)
            daemons = {pid: role_of(pid) for pid in children_of(os.getpid()) - before}
            yield PrivateRay(daemons, settings, slow_reason)


def _start(settings: PrivateSettings, running: ExitStack) -> str | None:
    """Starts Ray and connects, the fast way or else the public way; returns why the fast way failed."""
    try:
        with ExitStack() as attempt:
            _start_lean(settings, attempt)
            running.push(attempt.pop_all())
        return None
    except Exception as error:  # noqa: BLE001  it leans on private parts of Ray, where anything may have changed
        slow_reason = reason_of(error)
    _start_public(settings, running)
    return slow_reason


def _start_lean(settings: PrivateSettings, running: ExitStack) -> None:
    from k3ray.cluster.ray_head import Head

    head = Head(settings)
    running.callback(head.stop)
    connect(head.driver_address)
    running.callback(ray.shutdown)


def _start_public(settings: PrivateSettings, running: ExitStack) -> None:
    connect(
        "local",
        num_cpus=settings.cpus,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=settings.store_bytes,
        _plasma_directory=str(settings.store_directory),
        _memory=settings.memory_bytes,
        _temp_dir=str(settings.directory),
        _system_config=SYSTEM,
    )
    running.callback(ray.shutdown)
