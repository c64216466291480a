"""The runs of a memory benchmark as rows of a results file, and the facts of the machine they were made on."""

from __future__ import annotations

import csv
import datetime
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, pstdev

from benchmarks.memory_runs import Run

RESULTS = Path(__file__).parent / "results"


def this_machine() -> str:
    """The processor's name and how many of it, as the name of a file."""
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    name = found[1] if found else platform.machine()
    return re.sub(r"[^a-z0-9]+", "-", f"{name} {os.cpu_count()} cores".lower()).strip("-")


def append_rows(path: Path, machine: str, runs: Sequence[Run]) -> None:
    """Add one row a run."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    facts = {
        "date": datetime.date.today().isoformat(),
        "commit": done.stdout.strip() or "unknown",
        "machine": machine,
        "cores": len(os.sched_getaffinity(0)),
    }
    rows = [facts | _row(run) for run in runs]
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


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
