"""The runs of a memory benchmark as rows of a results file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, pstdev

from benchmarks.memory_runs import Run
from benchmarks.result_rows import append_records


def append_runs(path: Path, machine: str, runs: Sequence[Run]) -> None:
    """Add one row a run."""
    append_records(path, machine, [_row(run) for run in runs])


def _row(run: Run) -> dict[str, object]:
    return {
        "load": round(run.load, 2),
        "memory": run.rung.name,
        "turn": run.turn,
        "hard_limit": "yes" if run.limited else "no",
        "s_per_token": round(mean(run.steps), 3),
        "s_deviation": round(pstdev(run.steps), 3),
        "s_median": round(run.step, 3),
        "s_first_token": round(run.first_step, 3),
        "budget_bytes": run.plan.limit_bytes,
        "planned_bytes": run.plan.total_bytes,
        "peak_bytes": run.peak_bytes,
        "trunk_bytes_per_token": round(run.trunk_bytes),
        "planned_trunk_bytes": run.plan.trunk_bytes_per_token,
        "expert_bytes_per_token": round(run.expert_bytes),
        "planned_expert_bytes": run.plan.expert_bytes_per_token,
        "cache_slots": run.plan.cache_slots,
        "hit_rate": round(run.hit_rate, 4),
        "io_share": round(run.io_share, 3),
        "disk_chunk_gb_per_s": round(run.rates.chunks / 1e9, 3),
        "disk_expert_gb_per_s": round(run.rates.experts / 1e9, 3),
        "digest": run.digest[:16],
    }
