"""What this host has for k3ray, looked at one thing at a time: what was found, and what to do where it hinders."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from k3ray.cluster.budget_plan import gigabytes
from k3ray.cluster.machine import (
    ROOT,
    MemoryLimits,
    affinity,
    cpu_quota,
    default_threads,
    memory_limits,
    physical_cores,
)
from k3ray.cluster.ray_driver import RayFailure
from k3ray.cluster.ray_join import LOCAL, announced_address, examine
from k3ray.cluster.ray_settings import SHARED_MEMORY, SMALLEST_STORE_BYTES
from k3ray.kernels.compile import cache_directory
from k3ray.workers.checkpoint import index_cache
from k3ray.workers.counted import counted

OK, NOTE, STOP = "ok", "note", "stop"  # fine; works, but worse; nothing can run
LITTLE_MEMORY = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. advice: what to do, empty where nothing is to be done."""

    subject: str
    found: str
    level: str = OK
    advice: str = ""


def examine_host(ray_address: str | None = None, root: Path = ROOT) -> list[Finding]:
    """Look at everything that does not depend on a model. ray_address: as RaySettings.address, to be asked if any."""
    return [
        *check_packages(_requirements(), _installed_versions(), platform.python_version()),
        _processors(root),
        check_numa(root),
        check_memory(memory_limits(root)),
        check_shared_memory(SHARED_MEMORY),
        *_caches(),
        _ray(ray_address),
    ]


def _requirements() -> list[str]:
    """What k3ray's own metadata asks for: "Requires-Python" first, then its dependencies."""
    metadata = importlib.metadata.metadata("k3ray")
    return [f"python{metadata['Requires-Python'] or ''}", *(metadata.get_all("Requires-Dist") or [])]


def _installed_versions() -> dict[str, str]:
    installed = {}
    for text in _requirements()[1:]:
        name = Requirement(text).name
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def check_packages(requirements: list[str], installed: Mapping[str, str], python: str) -> list[Finding]:
    """Versions against the ranges that the package declares; a range without an upper bound is kept as it is."""
    wanted = SpecifierSet(requirements[0].removeprefix("python"))
    findings = [Finding("Python", python)]
    if not wanted.contains(python, prereleases=True):
        findings = [Finding("Python", python, STOP, f"expected {wanted}: install k3ray with such a Python")]
    found, wrong = [], []
    for requirement in map(Requirement, requirements[1:]):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = installed.get(requirement.name)
        found.append(f"{requirement.name} {version or 'missing'}")
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            wrong.append((f"{requirement.name}{requirement.specifier}", version is None))
    if not wrong:
        return [*findings, Finding("packages", ", ".join(found))]
    names = " ".join(f"'{name}'" for name, _ in wrong)
    level = STOP if any(missing for _, missing in wrong) else NOTE
    return [*findings, Finding("packages", ", ".join(found), level, f"pip install {names}")]


def _processors(root: Path) -> Finding:
    allowed, quota = len(affinity()), cpu_quota(root)
    cores, threads = len(physical_cores(root=root)), default_threads(root)
    limits = [f"{allowed} of {os.cpu_count()} logical processors allowed", counted(cores, "physical core")]
    limits += [] if quota is None else [f"a cgroup grants the time of {quota:g}"]
    return Finding("processors", f"{', '.join(limits)}; {counted(threads, 'thread')} by default")


def check_numa(root: Path) -> Finding:
    """The memory nodes; with several, a process a node keeps its weights near its cores."""
    folder = root / "sys/devices/system/node"
    nodes = sorted(folder.glob("node[0-9]*"), key=lambda node: int(node.name.removeprefix("node")))
    if len(nodes) < 2:
        return Finding("memory nodes (NUMA)", "one" if nodes else "not told: taken for one")
    lists = []
    for node in nodes:
        try:
            lists.append(f"{node.name} cpus {(node / 'cpulist').read_text().strip() or 'none'}")
        except OSError:
            lists.append(f"{node.name} not readable")
    advice = f"a process of its own for each node's cores: --stages {len(nodes)}, or --expert-shards {len(nodes)}"
    return Finding("memory nodes (NUMA)", f"{len(nodes)}: {', '.join(lists)}", NOTE, advice)


def check_memory(limits: MemoryLimits) -> Finding:
    """What may be used, and which limit says so."""
    found = (
        f"{gigabytes(limits.available_bytes)} available of {gigabytes(limits.machine_bytes)} (by {limits.decided_by})"
    )
    if limits.available_bytes >= LITTLE_MEMORY:
        return Finding("memory", found)
    return Finding("memory", found, NOTE, "end other programs, or raise that limit: the embedded model needs 0.5 GB")


def check_shared_memory(folder: Path) -> Finding:
    """Where Ray's object store lies: a container often has 64 MB."""
    try:
        status = os.statvfs(folder)
    except OSError as error:
        advice = "Ray's object store will lie on the disk: it works, messages take longer"
        return Finding(str(folder), f"not there ({error.strerror})", NOTE, advice)
    free_bytes = status.f_bavail * status.f_frsize
    if free_bytes * 9 // 10 >= SMALLEST_STORE_BYTES:
        return Finding(str(folder), f"{gigabytes(free_bytes)} free")
    advice = "too little for Ray's object store, which will lie on the disk; in Docker: --shm-size=1g"
    return Finding(str(folder), f"{free_bytes / 1e6:,.0f} MB free", NOTE, advice)


def _caches() -> list[Finding]:
    """The folders that spare work to the next start."""
    kernels = cache_directory()
    index = index_cache.usable_directory(index_cache.cache_directories())
    return [
        _folder("compiled kernels", kernels, "every process compiles them anew"),
        _folder("index of checkpoints", index, "every process reads all headers anew and holds an index of its own"),
    ]


def _ray(address: str | None) -> Finding:
    """Whether a run would join a cluster, and whether that one lets it in."""
    asked = address if address not in (None, "", "auto") else announced_address()
    version = f"Ray {importlib.metadata.version('ray')}"
    if asked is None or asked == LOCAL:
        return Finding("Ray", f"{version}; a run starts a small one of its own")
    try:
        cluster = examine(asked)
    except RayFailure as failure:
        return Finding("Ray", f"{version}; a run would join the cluster at {asked}", STOP, str(failure))
    return Finding("Ray", f"{version}; a run joins the cluster at {asked} ({counted(cluster.nodes, 'node')})")


def _folder(subject: str, folder: Path | None, otherwise: str) -> Finding:
    if folder is not None:
        return Finding(subject, f"kept in {folder}")
    advice = f"{otherwise}: set XDG_CACHE_HOME to a folder of yours that can be written"
    return Finding(subject, "no folder to keep them in", NOTE, advice)
