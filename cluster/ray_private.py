"""A small Ray of our own on this machine, started for one run and gone with it.

It has a token of its own, answers on the loopback address only, and touches nothing of the user's Ray settings.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import ray

from k3ray.cluster import machine
from k3ray.cluster.processes import children_of, descendants, role_of
from k3ray.cluster.ray_directory import session_directory
from k3ray.cluster.ray_driver import connect, quieten, ray_environment, reason_of
from k3ray.cluster.ray_settings import SYSTEM, PrivateSettings, private_settings

ENDING_S = 3.0  # what the processes are given to end by themselves


@dataclass(frozen=True, slots=True)
class PrivateRay:
    """What was started: the daemons by pid, with what settings, and why not the fast way (None: it was)."""

    daemons: Mapping[int, str]
    settings: PrivateSettings
    slow_reason: str | None


@contextmanager
def private_ray(workers: int, store_bytes: int) -> Iterator[PrivateRay]:
    """Starts Ray, connects this process as its driver, and at the end stops both and leaves no trace.

    `workers`: how many actors to prepare for, each in a process started ahead. Raises RayFailure with Ray's reason.
    """
    quieten()
    with session_directory() as directory, ray_environment(_variables()):
        machine_bytes = machine.memory_limits().machine_bytes
        settings = private_settings(directory, workers, store_bytes, len(machine.affinity()), machine_bytes)
        before = children_of(os.getpid())
        with ExitStack() as running:
            slow_reason = _start(settings, running)
            daemons = {pid: role_of(pid) for pid in children_of(os.getpid()) - before}
            try:
                yield PrivateRay(daemons, settings, slow_reason)
            finally:
                processes = descendants(daemons)  # the workers lose their parent with the raylet
                running.close()
                _await_end(processes)


def _variables() -> dict[str, str]:
    """A token that only this run knows, whatever mode and token the user's own clusters have."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # answers a question that some versions print
    }


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


def _await_end(processes: Sequence[int]) -> None:
    """Waits until all have ended, and kills those that take too long."""
    deadline = time.monotonic() + ENDING_S
    while descendants(processes):
        if time.monotonic() > deadline:
            for pid in descendants(processes):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
