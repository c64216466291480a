"""Where the time of a run's steps goes: counted in the stages and shards as they work, summed over all of them."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields

from k3ray.workers.hop_link import HopCounts


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Sums since the processes were loaded; seconds of wall clock inside each process.

    stage_s: the stages were at work on a step, which includes attention_s, feed_forward_s (router, projections, shared
    experts, and the routed ones with all that follows), head_s and expert_answer_s, in which a stage stood still for
    an answer of a shard; hop_s: the part of that in which no shard was at work on it, and what sending took. trips:
    requests to shards. shard_s: shards were at work, several at once.
    """

    steps: int = 0
    stage_s: float = 0.0
    attention_s: float = 0.0
    feed_forward_s: float = 0.0
    head_s: float = 0.0
    expert_answer_s: float = 0.0
    hop_s: float = 0.0
    trips: int = 0
    shard_s: float = 0.0

    @classmethod
    def of_hops(cls, hops: HopCounts) -> StepTimes:
        """What a stage's links counted."""
        return cls(
            expert_answer_s=hops.send_s + hops.wait_s,
            hop_s=hops.send_s + hops.hop_s,
            trips=hops.trips,
        )

    def parts(self, wall_s: float) -> dict[str, float]:
        """Return the seconds of wall_s, in which these steps were made one after the other, by what they went on.

        feed forward: without waiting for shards. experts: waiting while shards were at work. other: in the stages,
        mixing and messages. driver: outside of the stages, which is the calls between driver and stages; 0 where the
        stages' time is more than the wall clock's, as in a long prompt, where several are at work at once.
        """
        return {
            "attention": self.attention_s,
            "feed_forward": max(0.0, self.feed_forward_s - self.expert_answer_s),
            "experts": max(0.0, self.expert_answer_s - self.hop_s),
            "hops": self.hop_s,
            "head": self.head_s,
            "other": max(0.0, self.stage_s - self.attention_s - self.feed_forward_s - self.head_s),
            "driver": max(0.0, wall_s - self.stage_s),
        }

    def __add__(self, other: StepTimes) -> StepTimes:
        return StepTimes(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def __sub__(self, other: StepTimes) -> StepTimes:
        return StepTimes(*(getattr(self, field.name) - getattr(other, field.name) for field in fields(self)))


class StepClock:
    """Counts the steps of one stage. It is told what a slice tells its observers, and reads the clock then."""

    def __init__(self) -> None:
        self._steps = 0
        self._began = self._mark = 0.0
        self._sums = {"stage": 0.0, "attn": 0.0, "mlp": 0.0, "head": 0.0}

    @property
    def times(self) -> StepTimes:
        """The sums so far."""
        sums = self._sums
        return StepTimes(self._steps, sums["stage"], sums["attn"], sums["mlp"], sums["head"])

    def begin(self) -> None:
        """A step begins."""
        self._began = time.perf_counter()

    def observed(self, name: str) -> None:
        """A slice has just computed what it calls `name`: attn_in, attn_out, mlp_in, mlp_out, and others."""
        part, _, side = name.partition("_")
        if part in ("attn", "mlp") and side in ("in", "out"):
            now = time.perf_counter()
            if side == "out":
                self._sums[part] += now - self._mark
            self._mark = now

    def begin_head(self) -> None:
        """The head begins, which is the rest of the step."""
        self._mark = time.perf_counter()

    def end(self, with_head: bool) -> None:
        """The step is done."""
        now = time.perf_counter()
        self._steps += 1
        self._sums["stage"] += now - self._began
        if with_head:
            self._sums["head"] += now - self._mark
