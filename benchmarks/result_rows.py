"""Rows of a results file of any benchmark: what was measured, with the day, the commit and the machine."""

from __future__ import annotations

import csv
import datetime
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.memory_rows import RESULTS, this_machine

__all__ = ["RESULTS", "append_records", "this_machine"]


def append_records(path: Path, machine: str, records: Sequence[Mapping[str, object]]) -> None:
    """Add one row a record; all records have the same fields."""
    if not records:
        return
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    facts = {
        "date": datetime.date.today().isoformat(),
        "commit": done.stdout.strip() or "unknown",
        "machine": machine,
        "cores": len(os.sched_getaffinity(0)),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [*facts, *records[0]], lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows({**facts, **record} for record in records)
