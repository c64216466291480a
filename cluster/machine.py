"""What this host lets us use: cores, threads and memory, under the affinity mask and every cgroup limit above us.

Everything is read below a root directory, so a test hands in a tree of files. Nothing here knows of Ray or of a plan.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")

# A version 1 limit at or above this is the kernel's way of writing "none" (PAGE_COUNTER_MAX rounded to a page).
UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """How much more memory this process may take, and which limit says so."""

    available_bytes: int
    decided_by: str  # "MemAvailable", or the file of the tightest cgroup limit
    machine_bytes: int  # all the memory of the host, whatever may be used of it


def affinity() -> frozenset[int]:
    """The ids of the logical cpus this process may run on."""
    return frozenset(os.sched_getaffinity(0))


def physical_cores(cpus: Collection[int] | None = None, root: Path = ROOT) -> tuple[int, ...]:
    """One logical cpu, the lowest, of each physical core that has any of `cpus` (the affinity mask when None)."""
    lowest: dict[str, int] = {}
    for cpu in sorted(affinity() if cpus is None else cpus):
        lowest.setdefault(_core_of(cpu, root), cpu)
    return tuple(lowest.values())


def _core_of(cpu: int, root: Path) -> str:
    """What the cpus of one physical core have in common: the list of the core's hardware threads."""
    topology = root / "sys/devices/system/cpu" / f"cpu{cpu}" / "topology"
    for name in ("core_cpus_list", "thread_siblings_list"):
        siblings = _text(topology / name)
        if siblings:
            return siblings
    return f"cpu{cpu}"  # no topology told (a sandbox): every logical cpu is taken for a core


def cpu_quota(root: Path = ROOT) -> float | None:
    """The processor time, in cores, that the tightest cgroup above us grants; None where no cgroup limits it."""
    quotas = [quota for group in _groups("cpu", root) if (quota := _group_quota(group)) is not None]
    return min(quotas, default=None)


def _group_quota(group: Path) -> float | None:
    """The quota of one cgroup directory in cores: version 2 `cpu.max`, version 1 `cpu.cfs_quota_us`."""
    words = _text(group / "cpu.max").split() or [
        _text(group / "cpu.cfs_quota_us"),
        _text(group / "cpu.cfs_period_us"),
    ]
    quota_us, period_us = (_integer(word) for word in words[:2]) if len(words) >= 2 else (None, None)
    if quota_us is None or period_us is None or quota_us <= 0 or period_us <= 0:
        return None
    return quota_us / period_us


def default_threads(root: Path = ROOT) -> int:
    """Threads of computation for this host: its physical cores under the mask, no more than the quota, at least 1."""
    cores = len(physical_cores(root=root))
    quota = cpu_quota(root)
    return max(1, cores if quota is None else min(cores, math.floor(quota)))


def memory_limits(root: Path = ROOT) -> MemoryLimits:
    """The least of MemAvailable and, for every cgroup above us, its limit less what it holds and cannot give back.

    The page cache of a cgroup is given back under pressure, so it does not count as held; swap is not memory.
    """
    meminfo = _table(root / "proc/meminfo")
    kib = meminfo.get("MemAvailable")
    if kib is None:  # kernels before 3.14
        kib = sum(meminfo.get(name, 0) for name in ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable"))
    candidates = [(kib * 1024, "MemAvailable")]
    candidates += [limit for group in _groups("memory", root) for limit in _group_memory(group, root)]
    available_bytes, decided_by = min(candidates)
    return MemoryLimits(max(0, available_bytes), decided_by, meminfo.get("MemTotal", 0) * 1024)


def _group_memory(group: Path, root: Path) -> Iterator[tuple[int, str]]:
    """(bytes left, file of the limit) for each memory limit of one cgroup directory of either version."""
    held_bytes = _integer(_text(group / "memory.current"))
    reclaimable: tuple[str, ...] = ("active_file", "inactive_file", "slab_reclaimable")
    limits = ["memory.max", "memory.high"]  # above `high` the kernel throttles: as good as a limit
    if held_bytes is None:
        held_bytes = _integer(_text(group / "memory.usage_in_bytes"))
        reclaimable = ("total_active_file", "total_inactive_file")
        limits = ["memory.limit_in_bytes"]
    statistics = _table(group / "memory.stat")
    given_back_bytes = sum(statistics.get(name, 0) for name in reclaimable)
    for name in limits:
        limit_bytes = _integer(_text(group / name))
        if limit_bytes is not None and limit_bytes < UNLIMITED_BYTES:
            kept_bytes = max(0, (held_bytes or 0) - given_back_bytes)
            yield limit_bytes - kept_bytes, "/" + str((group / name).relative_to(root))


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Our cgroup directory and its ancestors up to the mount point, in every hierarchy that may hold `controller`."""
    mounts = list(_cgroup_mounts(root))
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        unified = number == "0" and not controllers
        if not unified and controller not in controllers.split(","):
            continue
        for kind, options, mounted, point in mounts:
            if kind == "cgroup2" if unified else kind == "cgroup" and controller in options:
                yield from _ancestors(point, _below(path, mounted))
                break


def _ancestors(point: Path, relative: str) -> Iterator[Path]:
    """`point`/`relative` and every directory above it up to `point`, those that exist."""
    directory = point / relative
    while not directory.is_dir() and directory != point:  # a path of another namespace: nothing of it is to be seen
        directory = directory.parent
    while True:
        yield directory
        if directory == point:
            return
        directory = directory.parent


def _below(path: str, mounted: str) -> str:
    """`path` of a cgroup relative to the part of the hierarchy that is mounted (a container mounts only its own)."""
    prefix = mounted.rstrip("/")
    relative = path[len(prefix) :] if path == mounted or path.startswith(prefix + "/") else path
    parts = [part for part in relative.split("/") if part not in ("", "..")]
    return "/".join(parts)


def _cgroup_mounts(root: Path) -> Iterator[tuple[str, frozenset[str], str, Path]]:
    """(kind, options, mounted root, mount point below `root`) of each cgroup mount in /proc/self/mountinfo."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        fields, _, rest = line.partition(" - ")
        kind, _, options = [*rest.split(" "), "", ""][:3]
        if kind in ("cgroup", "cgroup2"):
            _, _, _, mounted, point = fields.split(" ")[:5]
            yield kind, frozenset(options.split(",")), mounted, root / point.lstrip("/")


def _text(path: Path) -> str:
    """The file's text without the final newline; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _integer(word: str) -> int | None:
    try:
        return int(word)
    except ValueError:
        return None  # "max", or no such file


def _table(path: Path) -> dict[str, int]:
    """Lines of `name value` or `name: value kB` as a table of numbers."""
    rows = (line.replace(":", " ").split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}


def is_in_memory(folder: Path, root: Path = ROOT) -> bool:
    """Whether what is written to a folder is kept in memory (tmpfs, ramfs), by the mount that it is on."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    kinds = (line.partition(" - ")[2].split()[:1] for line in lines if line.split()[2:3] == [number])
    return any(kind in (["tmpfs"], ["ramfs"]) for kind in kinds)
