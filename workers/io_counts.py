"""What a process read and waited for: counted at the readers, so that nothing flatters."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from k3ray.workers.experts import ExpertStore
from k3ray.workers.message_counts import MessageCounts
from k3ray.workers.step_times import StepTimes
from k3ray.workers.tape.source import TapeSource


@dataclass(frozen=True, slots=True)
class IoCounts:
    """Sums since the process was loaded.

    trunk_bytes, expert_bytes: what the disks gave. trunk_ahead_bytes: of trunk_bytes, read for the step to come.
    requests: experts asked for; hits: of these, resident before anything was read. *_wait_s: time in which the
    arithmetic stood still. times: where the steps' time went.
    messages: what went between the actors.
    """

    trunk_bytes: int = 0
    trunk_ahead_bytes: int = 0
    trunk_reads: int = 0
    trunk_wait_s: float = 0.0
    expert_bytes: int = 0
    expert_reads: int = 0
    expert_wait_s: float = 0.0
    requests: int = 0
    hits: int = 0
    times: StepTimes = field(default_factory=StepTimes)
    messages: MessageCounts = field(default_factory=MessageCounts)

    @property
    def hit_rate(self) -> float:
        """Resident hits of all expert requests; 1.0 when there were none."""
        return self.hits / self.requests if self.requests else 1.0

    @classmethod
    def of(cls, store: ExpertStore | None, tape: TapeSource | None) -> IoCounts:
        """Read the counters of one process."""
        trunk = cls()
        if tape is not None:
            ring = tape.statistics()
            trunk = cls(ring.bytes_read, ring.bytes_ahead, ring.reads, ring.wait_s)
        if store is None:
            return trunk
        counts, reader = store.counts, store.reader
        experts = cls(0, 0, 0, 0.0, reader.bytes_read, reader.reads, counts.wait_s, counts.requests, counts.hits)
        return trunk + experts

    def __add__(self, other: IoCounts) -> IoCounts:
        return IoCounts(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self)))

    def __sub__(self, other: IoCounts) -> IoCounts:
        return IoCounts(*(getattr(self, part.name) - getattr(other, part.name) for part in fields(self)))
