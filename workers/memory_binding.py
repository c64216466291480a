"""Where a process's threads and memory lie on a machine of several memory nodes (NUMA): bound to one of them.

It knows nothing of models: whoever starts a process's work calls bind_process before it takes any large memory. Bound
memory is nearer, never different: what cannot be bound is said in one line and costs speed only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
NODES = "sys/devices/system/node"

# include/uapi/linux/mempolicy.h
MPOL_DEFAULT = 0
MPOL_PREFERRED = 1  # this node while it has room, then the others
MPOL_BIND = 2  # this node or none: the kernel ends the process when the node is full
MPOL_INTERLEAVE = 3

# The numbers of set_mempolicy and get_mempolicy by processor: the kernel's syscall tables.
SYSTEM_CALLS = {
    "x86_64": (238, 239),
    "aarch64": (237, 236),
    "riscv64": (237, 236),
    "loongarch64": (237, 236),
    "ppc64le": (261, 260),
    "s390x": (270, 269),
}
MAX_NODES = 1024  # the most that a kernel is built for (CONFIG_NODES_SHIFT 10)
WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
USABLE_SHARE = 0.95  # of what a node has free or can give back: the rest is for page tables and for others


@dataclass(frozen=True, slots=True)
class MemoryNode:
    """One memory node: its logical cpus, and the bytes that are free or hold only cached files."""

    cpus: frozenset[int]
    available_bytes: int


def bind_process(numa: int | None, cores: Iterable[int], needed_bytes: int | None = None, root: Path = ROOT) -> str:
    """Bind this process's threads to the cpus of a memory node, and the memory that they will take to that node.

    Does nothing where numa is None or the system tells of fewer than two nodes. Threads that are pinned to cpus of the
    node stay so; the others, and those started later, may run on every allowed cpu of the node. The memory policy
    holds for the calling thread and those that it starts later.

    cores: those that the computing threads will be pinned to, all of the node's or nothing is bound. needed_bytes: of
    all processes that are bound to this node together. Where the node can give that, memory is bound strictly: old
    cached files make room. Otherwise, and where it is not known, the node is only preferred: the kernel kills a
    strictly bound process for which the node has no room, however much there is on others.

    Returns one line where something was denied or does not fit, else nothing.
    """
    nodes = {} if numa is None else memory_nodes(root)
    if numa is None or len(nodes) < 2:
        return ""
    if numa not in nodes:
        return _unbound(numa, f"the system has {_numbers(nodes)}")
    node, allowed = nodes[numa], os.sched_getaffinity(0)
    if not node.cpus & allowed:
        return _unbound(numa, f"its cpus ({_numbers(node.cpus)}) are not among the allowed ones ({_numbers(allowed)})")
    strangers = set(cores) - node.cpus
    if strangers:
        return _unbound(numa, f"cpus {_numbers(strangers)} are planned for it and are of another node")
    problem = _pin_threads(node.cpus & allowed)
    if problem:
        return _unbound(numa, problem)
    fits = needed_bytes is not None and needed_bytes <= USABLE_SHARE * node.available_bytes
    number = set_memory_policy(MPOL_BIND if fits else MPOL_PREFERRED, (numa,))
    if number:
        return (
            f"memory node {numa}: threads are bound to its cpus, memory is not ({_denial(number)}): "
            "the system places it where the threads run, while there is room"
        )
    if needed_bytes is None or fits:
        return ""
    return (
        f"memory node {numa} has {node.available_bytes / 1e9:.1f} GB for the {needed_bytes / 1e9:.1f} GB that are "
        "planned for it: what does not fit goes to other nodes, and is read more slowly"
    )


def memory_nodes(root: Path = ROOT) -> dict[int, MemoryNode]:
    """The memory nodes that the system tells of, by number; empty where it tells of none, or not readably."""
    found = {}
    for folder in (root / NODES).glob("node[0-9]*"):
        try:
            cpus = parse_cpu_list((folder / "cpulist").read_text())
            rows = [line.split() for line in (folder / "meminfo").read_text().splitlines()]
            table = {row[2].rstrip(":"): int(row[3]) for row in rows if len(row) > 3}
            number = int(folder.name.removeprefix("node"))
        except (OSError, ValueError):
            return {}
        kib = sum(table.get(name, 0) for name in ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable"))
        found[number] = MemoryNode(cpus, 1024 * kib)
    return found


def parse_cpu_list(text: str) -> frozenset[int]:
    """The numbers of the kernel's list form, 0-3,8 (see cpuset(7)); ValueError where it is not one."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if part:
            low, dash, high = part.partition("-")
            cpus |= set(range(int(low), int(high if dash else low) + 1))
    return frozenset(cpus)


def set_memory_policy(mode: int, nodes: Iterable[int] = ()) -> int:
    """set_mempolicy(2) for the calling thread and those it starts later; returns 0 or the error's number."""
    mask = _node_mask(nodes)
    return _system_call(0, ctypes.c_long(mode), mask, ctypes.c_ulong(MAX_NODES + 1))


def memory_policy() -> tuple[int, frozenset[int]]:
    """get_mempolicy(2): the calling thread's mode and nodes; OSError where that is denied."""
    mode, mask = ctypes.c_int(), _node_mask(())
    number = _system_call(1, ctypes.byref(mode), mask, ctypes.c_ulong(MAX_NODES), ctypes.c_void_p(), ctypes.c_ulong(0))
    if number:
        raise OSError(number, os.strerror(number))
    return mode.value, frozenset(bit for bit in range(MAX_NODES) if mask[bit // WORD_BITS] >> bit % WORD_BITS & 1)


def _node_mask(nodes: Iterable[int]) -> ctypes.Array[ctypes.c_ulong]:
    mask = (ctypes.c_ulong * (MAX_NODES // WORD_BITS + 1))()  # one word more: the kernel reads up to maxnode - 1 bits
    for node in nodes:
        mask[node // WORD_BITS] |= 1 << node % WORD_BITS
    return mask


def _system_call(which: int, *arguments: object) -> int:
    """Call number `which` of this processor's pair; returns 0 or the error's number."""
    numbers = SYSTEM_CALLS.get(platform.machine())
    if numbers is None or platform.system() != "Linux":
        return errno.ENOSYS
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    return 0 if library.syscall(ctypes.c_long(numbers[which]), *arguments) == 0 else ctypes.get_errno()


def _pin_threads(cpus: frozenset[int] | set[int]) -> str:
    """Keep every thread of this process on `cpus`, narrower masks inside as they are; says what was denied."""
    seen: set[Path] = set()
    while new := set(Path("/proc/self/task").iterdir()) - seen:  # a thread that was being started meanwhile
        for thread in new:
            try:
                mask = os.sched_getaffinity(int(thread.name))
                if not mask <= cpus:
                    os.sched_setaffinity(int(thread.name), mask & cpus or cpus)
            except ProcessLookupError:
                continue  # it has ended
            except OSError as error:
                return f"its cpus are denied: {error.strerror}"
        seen |= new
    return ""


def _denial(number: int) -> str:
    reasons = {
        errno.EPERM: "a container without the right CAP_SYS_NICE, or a filter of system calls, denies it",
        errno.ENOSYS: "this system has no set_mempolicy",
        errno.EINVAL: "the node has no memory that this process may use: see Mems_allowed_list in /proc/self/status",
    }
    return f"{os.strerror(number)}: {reasons[number]}" if number in reasons else os.strerror(number)


def _unbound(numa: int, why: str) -> str:
    return f"memory node {numa}: nothing is bound to it: {why}"


def _numbers(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
