"""Runs of `k3ray generate` as a user's process under a memory budget: what was planned, and what was measured."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.hard_limit import LimitedGroup, limited_group
from k3ray.cluster.budget_plan import BudgetPlan
from k3ray.cluster.devices import CHUNK, EXPERT, measurable_files, measure_disk
from k3ray.cluster.machine import default_threads, physical_cores
from k3ray.cluster.plan import make_plan
from k3ray.cluster.wishes import merge_wishes
from k3ray.memory import MemoryWish, choose_tape, plan_memory
from k3ray.workers.loading import CheckpointSpec, open_checkpoint
from k3ray.workers.model.config import read_config
from k3ray.workers.tape.direct_io import PAGE_BYTES

PROMPT_ID = 5  # a prompt of one token, so that every step is a step of one token
DISK_SECONDS = 0.4  # of each of the four figures before every run
TOLERANCE = 1.05  # of the measured peak over the plan


@dataclass(frozen=True, slots=True)
class Rung:
    """One division of memory: a name for the tables, and the command's flags."""

    name: str
    flags: tuple[tuple[str, str], ...]

    @property
    def words(self) -> list[str]:
        """The flags as words of a command line."""
        return [word for flag in self.flags for word in flag]


@dataclass(frozen=True, slots=True)
class DiskRates:
    """Bytes a second as the engine reads, measured just before a run: the better of depth 1 and 16."""

    chunks: float
    experts: float


@dataclass(frozen=True, slots=True)
class Run:
    """One run. turn: which of the repeats. steps: seconds of every token but the first, which proves the tape's
    checksums. digest: of the first logits and of all ids. *_bytes of trunk and experts: a token.
    """

    rung: Rung
    turn: int
    plan: BudgetPlan
    rates: DiskRates
    load: float
    limited: bool
    steps: tuple[float, ...]
    first_step: float
    peak_bytes: int
    trunk_bytes: float
    expert_bytes: float
    expert_reads: float
    hit_rate: float
    io_share: float
    digest: str

    @property
    def step(self) -> float:
        """The median step."""
        return statistics.median(self.steps)

    @property
    def streams(self) -> bool:
        """Whether a step reads any trunk."""
        return self.plan.trunk_bytes_per_token > 0

    @property
    def read_seconds(self) -> float:
        """What reading a token's bytes takes at the disk's measured speed."""
        return self.trunk_bytes / self.rates.chunks + self.expert_bytes / self.rates.experts

    def broken_claims(self) -> list[str]:
        """What this run alone shows to be wrong; empty when all is well."""
        broken = []
        if self.peak_bytes > TOLERANCE * self.plan.total_bytes:
            broken.append(f"peak {self.peak_bytes:,} is above the plan {self.plan.total_bytes:,} + 5 %")
        if self.peak_bytes > self.plan.limit_bytes:
            broken.append(f"peak {self.peak_bytes:,} is above the budget {self.plan.limit_bytes:,}")
        if self.trunk_bytes != self.plan.trunk_bytes_per_token:
            broken.append(f"{self.trunk_bytes:,} bytes of trunk a token, planned {self.plan.trunk_bytes_per_token:,}")
        most = self.plan.expert_bytes_per_token + 2 * PAGE_BYTES * self.expert_reads  # the disk gives whole pages
        if self.plan.expert_bytes_per_token and self.expert_bytes > most:
            broken.append(f"{self.expert_bytes:,.0f} bytes of experts a token, planned at most {most:,.0f}")
        return [f"{self.rung.name}: {line}" for line in broken]


def plan_of(model: Path, tape: Path, rung: Rung, gen: int) -> BudgetPlan:
    """What the command will plan, computed here; raises MemoryFailure where it will refuse."""
    spec = CheckpointSpec(model, None, read_config(model).num_hidden_layers)
    checkpoint = open_checkpoint(spec)
    plan = make_plan(spec, 1, 0, default_threads(), physical_cores())
    wish = MemoryWish(choose_tape(checkpoint, tape), merge_wishes(rung.flags), None)
    return plan_memory(checkpoint, plan, wish, 1 + gen, starts_ray=True)[1]


def measure_rates(model: Path, tape: Path) -> DiskRates:
    """The disk as it is at this moment, with whatever else uses it."""
    paths = {CHUNK: measurable_files(tape)[:1], EXPERT: measurable_files(model)}
    best = {
        kind: max(speed.bytes_per_s for speed in measure_disk(files, DISK_SECONDS, kinds=(kind,)))
        for kind, files in paths.items()
    }
    return DiskRates(best[CHUNK], best[EXPERT])


def run_rung(model: Path, tape: Path, rung: Rung, turn: int, gen: int, folder: Path, cgroup: Path | None) -> Run:
    """Run the command once, under a hard limit where a cgroup is named; exits with its output when it fails."""
    plan, rates, load = plan_of(model, tape, rung, gen), measure_rates(model, tape), os.getloadavg()[0]
    out, logits = folder / "run.json", folder / "logits"
    command = [str(Path(sys.executable).with_name("k3ray")), "generate", str(model), "--tape", str(tape)]
    command += ["--ids", str(PROMPT_ID), "--gen", str(gen), "--ignore-eos"]
    command += ["--out", str(out), "--dump-logits", str(logits), *rung.words]
    with limited_group(cgroup, plan.limit_bytes) if cgroup is not None else nullcontext() as group:
        _execute(command, group)
    report = json.loads(out.read_text())
    if report["planned_memory"] != plan.parts():
        sys.exit(f"{rung.name}: the command planned {report['planned_memory']}, expected {plan.parts()}")
    digest = hashlib.sha256(logits.read_bytes() + json.dumps(report["generated_ids"]).encode()).hexdigest()
    return _run_of(report, rung, turn, plan, rates, load, group is not None, digest)


def _execute(command: Sequence[str], group: LimitedGroup | None) -> None:
    done = subprocess.run(
        command if group is None else group.wrap(command), capture_output=True, text=True, check=False
    )
    if done.returncode:
        killed = f"; the kernel ended {group.kills()} processes at the limit" if group is not None else ""
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}{killed}:\n{done.stderr}")


def _run_of(
    report: dict[str, Any],
    rung: Rung,
    turn: int,
    plan: BudgetPlan,
    rates: DiskRates,
    load: float,
    limited: bool,
    digest: str,
) -> Run:
    tokens, io = len(report["generated_ids"]), report["io"]
    return Run(
        rung=rung,
        turn=turn,
        plan=plan,
        rates=rates,
        load=load,
        limited=limited,
        steps=tuple(report["step_seconds"][1:]),
        first_step=report["step_seconds"][0],
        peak_bytes=report["peak_memory_bytes"],
        trunk_bytes=(io["trunk_bytes"] - io["trunk_ahead_bytes"]) / tokens,
        expert_bytes=io["expert_bytes"] / tokens,
        expert_reads=io["expert_reads"] / tokens,
        hit_rate=report["resident_hit_rate"],
        io_share=report["io_share"],
        digest=digest,
    )
