"""What a private Ray is started with: decided here, acted upon elsewhere."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
SHARED_MEMORY = Path("/dev/shm")
SMALLEST_STORE_BYTES = 76 * MIB  # Ray refuses less than 75

# Ray's internal settings. Its memory monitor takes the page cache of a cgroup for used memory and kills workers that
# stream files; the budget is ours to keep. The raylet retries the connection to its own store once a second by default.
SYSTEM = {
    "memory_monitor_refresh_ms": 0,
    "enable_metrics_collection": False,
    "worker_niceness": 0,  # by default 15: then any neighbour takes the cores that a run was given
    "enable_pipe_based_agent_to_parent_health_check": True,  # the agents' input ends with the raylet
    "raylet_client_connect_timeout_milliseconds": 20,
    "raylet_client_num_connect_attempts": 1500,
}

# The workers compute in pools of their own, so OpenBLAS needs no thread per core. OMP_NUM_THREADS is left as it is.
# The second answers a question that some versions of Ray print about graphics processors.
WORKER_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@dataclass(frozen=True, slots=True)
class PrivateSettings:
    """One private Ray. The counts of cpus and memory only serve Ray's placement: they limit nothing."""

    directory: Path  # for sockets, logs and spilled objects
    workers: int  # processes to start ahead
    cpus: int
    memory_bytes: int
    store_bytes: int
    store_directory: Path


def private_settings(
    directory: Path,
    workers: int,
    store_bytes: int,
    cpus: int,
    memory_bytes: int,
    shared_memory: Path = SHARED_MEMORY,
) -> PrivateSettings:
    """Settings for `workers` actors on a machine of `cpus` and `memory_bytes`.

    The object store lies in shared memory if nine tenths of the free room there hold it, in less room if they do not,
    and on the disk below `directory` where they are too little for Ray: a container may have 64 MB. A page that a full
    /dev/shm cannot give ends a process with SIGBUS, hence the tenth.
    """
    try:
        status = os.statvfs(shared_memory)
        free_bytes = status.f_bavail * status.f_frsize * 9 // 10
    except OSError:
        free_bytes = 0
    in_memory = free_bytes >= SMALLEST_STORE_BYTES
    return PrivateSettings(
        directory=directory,
        workers=workers,
        cpus=max(cpus, workers),
        memory_bytes=memory_bytes,
        store_bytes=max(SMALLEST_STORE_BYTES, min(store_bytes, free_bytes) if in_memory else store_bytes),
        store_directory=shared_memory if in_memory else directory,
    )
