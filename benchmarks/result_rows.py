"""Rows of a results file of any benchmark: what was measured, with the day, the commit and the machine."""

from __future__ import annotations

import csv
import datetime
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def this_machine() -> str:
    """The processor's name and how many of it, as the name of a file."""
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    name = found[1] if found else platform.machine()
    return re.sub(r"[^a-z0-9]+", "-", f"{name} {os.cpu_count()} cores".lower()).strip("-")


def facts_of(machine: str) -> dict[str, object]:
    """What every row begins with."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "date": datetime.date.today().isoformat(),
        "commit": done.stdout.strip() or "unknown",
        "machine": machine,
        "cores": len(os.sched_getaffinity(0)),
    }


def append_records(path: Path, machine: str, records: Sequence[Mapping[str, object]]) -> None:
    """Add one row a record, behind the facts."""
    facts = facts_of(machine)
    append_rows(path, [{**facts, **record} for record in records])


def append_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Add rows as they are; all have the same fields."""
    if not rows:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)
