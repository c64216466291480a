"""How much memory our processes hold, sampled in the background: the sum of their proportional set sizes (PSS).

A page that several processes share is counted once over all of them; pages of files that nobody has mapped (the page
cache) belong to no process and are not counted. Knows of Ray only how it titles its processes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from k3ray.workers.own_memory import proportional_bytes

PROC = Path("/proc")
INTERVAL_S = 0.5

# The sampler takes at most this share of one core: the kernel walks the page tables of every process for one sample.
LARGEST_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class MemorySample:
    """The memory of all watched processes at one moment."""

    total_bytes: int
    role_bytes: Mapping[str, int]  # role -> sum over its processes
    role_counts: Mapping[str, int]  # role -> how many processes
    exact: bool  # False: some process hid its PSS, so its resident less its shared memory was taken (too little)


NOTHING = MemorySample(0, {}, {}, True)


@dataclass(slots=True)
class ProcessMemory:
    """Samples the watched processes and all their descendants until stopped; keeps the largest sample.

    `with ProcessMemory({os.getpid(): "driver", **runtime.daemon_pids()}) as memory: ...; memory.peak_bytes`
    """

    roots: Mapping[int, str]  # pid -> role; their descendants get the role that Ray's title tells, else their parent's
    interval_s: float = INTERVAL_S
    proc: Path = PROC
    peak: MemorySample = field(default=NOTHING, init=False)
    samples: int = field(default=0, init=False)
    cost_s: float = field(default=0.0, init=False)  # the mean time of a sample
    _watched: dict[int, tuple[str, str]] = field(default_factory=dict, init=False)  # pid -> (role, start time)
    _stopping: threading.Event = field(default_factory=threading.Event, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        for pid, role in self.roots.items():
            self.watch(pid, role)

    @property
    def peak_bytes(self) -> int:
        """The largest sum over all processes that any sample found."""
        return self.peak.total_bytes

    def watch(self, pid: int, role: str) -> None:
        """Adds a process (with its descendants) that is no descendant of the roots; one that has ended is ignored."""
        status = _status(self.proc, pid)
        if status is not None:
            self._watched[pid] = (role, status[1])

    def __enter__(self) -> ProcessMemory:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Begins to sample in a daemon thread."""
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, name="process-memory", daemon=True)
        self._thread.start()

    def stop(self) -> MemorySample:
        """Takes one last sample, ends the thread and returns the peak. A second call changes nothing."""
        if self._thread is not None:
            self._stopping.set()
            self._thread.join()
            self._thread = None
            self.sample()
        return self.peak

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.sample()
            self._stopping.wait(max(self.interval_s, self.cost_s / LARGEST_SHARE))

    def sample(self) -> MemorySample:
        """Measures now, and keeps the sample if it is the largest so far."""
        started = time.perf_counter()
        role_bytes: dict[str, int] = {}
        role_counts: dict[str, int] = {}
        exact = True
        for pid, role in self._processes():
            measured = proportional_bytes(self.proc / str(pid))
            if measured is None:
                continue  # it ended since it was listed
            exact = exact and measured[1]
            role_bytes[role] = role_bytes.get(role, 0) + measured[0]
            role_counts[role] = role_counts.get(role, 0) + 1
        found = MemorySample(sum(role_bytes.values()), role_bytes, role_counts, exact)
        with self._lock:
            if found.total_bytes > self.peak.total_bytes:
                self.peak = found
            self.samples += 1
            self.cost_s += (time.perf_counter() - started - self.cost_s) / self.samples
        return found

    def _processes(self) -> Iterator[tuple[int, str]]:
        """(pid, role) of every watched process that still lives and of all descendants, each once."""
        children, starts = _family(self.proc)
        # The start time tells a watched process from another that was given its number after its end.
        pending = [(pid, role) for pid, (role, start) in dict(self._watched).items() if starts.get(pid) == start]
        seen = {pid for pid, _ in pending}
        while pending:
            pid, role = pending.pop()
            yield pid, role
            for child in children.get(pid, ()):
                if child not in seen:
                    seen.add(child)
                    pending.append((child, role_of(child, self.proc, parent_role=role)))


def role_of(pid: int, proc: Path = PROC, parent_role: str = "") -> str:
    """What a process is, from its command line: the class of a Ray actor, else its parent's role or its own name."""
    try:
        words = (proc / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return parent_role or "ended"
    title = words[0].strip()
    if title.startswith("ray::"):
        kind = title.removeprefix("ray::").partition(".")[0].partition("(")[0].strip()
        return "idle worker" if kind == "IDLE" else kind
    program = Path(title).name
    scripts = (Path(word).stem for word in words[1:] if word.endswith(".py"))
    return parent_role or (next(scripts, program) if program.startswith("python") else program)


def children_of(pid: int, proc: Path = PROC) -> frozenset[int]:
    """The processes that `pid` has started and that live."""
    return frozenset(_family(proc)[0].get(pid, ()))


def _family(proc: Path) -> tuple[dict[int, list[int]], dict[int, str]]:
    """(children of each parent, start time of each process) of all the processes that are to be seen."""
    children: dict[int, list[int]] = {}
    starts: dict[int, str] = {}
    for pid in _pids(proc):
        status = _status(proc, pid)
        if status is not None:
            children.setdefault(status[0], []).append(pid)
            starts[pid] = status[1]
    return children, starts


def _pids(proc: Path) -> list[int]:
    return [int(entry.name) for entry in proc.iterdir() if entry.name.isdigit()]


def _status(proc: Path, pid: int) -> tuple[int, str] | None:
    """(parent's pid, start time) of a process; None once it has ended, though nobody has asked for its exit code."""
    try:
        text = (proc / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return None if fields[0] in "ZX" else (int(fields[1]), fields[19])
