"""What a run did, as records: for the terminal, for --out, and for callers of the Python API."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from k3ray.amounts import decimal_size
from k3ray.cluster.recovery_plan import Recovery
from k3ray.cluster_report import MessageReport, NodeReport
from k3ray.workers.counted import counted
from k3ray.workers.io_counts import IoCounts


@dataclass(frozen=True, slots=True)
class Settings:
    """What was asked for, defaults filled in. threads: of all processes together. layers: how many were run."""

    stages: int
    expert_shards: int
    threads: int
    layers: int


@dataclass(frozen=True, slots=True)
class Generation:
    """One finished generation.

    text: None without a vocabulary. step_seconds: wall time of every token, the first with the prompt.
    seconds_per_token: the mean of all steps but the first, or the first when there is only one. peak_memory_bytes:
    measured, all processes, PSS; planned_memory: what was planned before, by part. io: what was read for this
    generation, counted at the readers; None when it failed. *_device: the block devices they are on.
    damaged_experts: (layer, expert) of experts with a NaN scale byte that were used. recoveries: what was lost and
    replaced meanwhile. nodes: of a cluster, empty on one host. messages: between the actors; None when it failed.
    first_logits: (vocab,) f32.
    """

    model: str
    ray: str
    prompt_ids: list[int]
    generated_ids: list[int]
    text: str | None
    stop_reason: str
    layers: int
    step_seconds: list[float]
    settings: dict[str, Any]
    versions: dict[str, str]
    peak_memory_bytes: int
    peak_memory_by_process: dict[str, int]
    planned_memory_bytes: int
    planned_memory: dict[str, int]
    io: IoCounts | None
    trunk_device: str
    expert_device: str
    damaged_experts: list[tuple[int, int]]
    recoveries: list[Recovery]
    nodes: list[NodeReport]
    messages: MessageReport | None
    first_logits: npt.NDArray[np.float32]

    @property
    def full_ids(self) -> list[int]:
        """Prompt and generated ids."""
        return self.prompt_ids + self.generated_ids

    @property
    def seconds_per_token(self) -> float:
        """Seconds a generated token, the prompt's step left out where there is another."""
        steps = self.step_seconds[1:] or self.step_seconds
        return sum(steps) / len(steps)

    def as_json(self) -> dict[str, Any]:
        """Return what --out writes."""
        record = {name: value for name, value in asdict(self).items() if name != "first_logits"}
        derived: dict[str, Any] = {"full_ids": self.full_ids, "seconds_per_token": self.seconds_per_token}
        if self.io is not None:
            waits = dict.fromkeys((self.trunk_device, self.expert_device), 0.0)
            waits[self.trunk_device] += self.io.trunk_wait_s
            waits[self.expert_device] += self.io.expert_wait_s
            derived |= {"resident_hit_rate": self.io.hit_rate, "io_share": self.io_share, "device_wait_s": waits}
            derived["time_parts_s"] = self.time_parts
        return {**record, **derived}

    @property
    def io_share(self) -> float:
        """The part of the wall clock in which the arithmetic waited for a disk."""
        return (self.io.trunk_wait_s + self.io.expert_wait_s) / sum(self.step_seconds) if self.io is not None else 0.0

    def disk_line(self) -> str:
        """Return the line about what was read; counted at the readers."""
        if self.io is None:
            return "disk: not counted, the run failed"
        count = len(self.generated_ids)
        trunk, experts = decimal_size(self.io.trunk_bytes // count), decimal_size(self.io.expert_bytes // count)
        return (
            f"disk: {trunk} of trunk and {experts} of experts a token; {counted(self.io.requests, 'expert request')}, "
            f"{self.io.hit_rate:.1%} resident; waited {self.io.trunk_wait_s:.2f} s for trunk ({self.trunk_device}), "
            f"{self.io.expert_wait_s:.2f} s for experts ({self.expert_device}), {self.io_share:.0%} of the time"
        )

    @property
    def time_parts(self) -> dict[str, float]:
        """Seconds of all steps by what they went on, see StepTimes.parts; empty when the run failed."""
        return self.io.times.parts(sum(self.step_seconds)) if self.io is not None else {}

    def time_line(self) -> str:
        """Return the line about where the time went."""
        parts = self.time_parts
        if not parts:
            return "time: not counted, the run failed"
        named = {
            "attention": parts["attention"],
            "feed forward": parts["feed_forward"],
            "waiting for expert shards": parts["experts"],
            "hops to them": parts["hops"],
            "head": parts["head"],
            "the rest of the stages": parts["other"],
            "between stages and driver": parts["driver"],
        }
        whole = sum(named.values())
        return "time: " + ", ".join(f"{part / whole:.1%} {name}" for name, part in named.items() if part)

    def summary(self) -> str:
        """Return the last line of a run."""
        total, count = sum(self.step_seconds), len(self.generated_ids)
        reason = "stopped before the end" if self.stop_reason.startswith("stopped: ") else self.stop_reason
        return (
            f"done: {counted(count, 'token')} in {total:.2f} s ({reason}), {self.seconds_per_token:.3f} s/token after "
            f"the first, prompt of {counted(len(self.prompt_ids), 'token')} and first token "
            f"{self.step_seconds[0]:.2f} s, peak memory of all processes {self.peak_memory_bytes / 1e9:.2f} GB, "
            f"planned {self.planned_memory_bytes / 1e9:.2f} GB"
        )
