"""k3ray compare-logits: how far two files of logits are from each other; exit code 1 beyond what is tolerated."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import typer

from k3ray.commands.terminal import say
from k3ray.conform.report import finite
from k3ray.logits_comparison import TOP, LogitsDifference, compare_logits
from k3ray.logits_files import read_logits
from k3ray.workers.counted import counted
from k3ray.workers.failure import Failure


class ToleranceUsage(Failure):
    """A tolerance that is not a number of zero or more."""

    exit_code = 2


def run(a: str, b: str, tolerance: float | None, max_kl: float | None, as_json: bool) -> None:
    """Compare and print; raises typer.Exit(1) when B differs from A by more than is tolerated.

    Without any tolerance nothing but equal bits will do: that is what two runs of k3ray owe each other.
    """
    for option, value in (("--tolerance", tolerance), ("--max-kl", max_kl)):
        if value is not None and not 0 <= value < math.inf:
            raise ToleranceUsage(f"{option} {value}: expected a number of 0 or more")
    found = compare_logits(read_logits(a), read_logits(b))
    complaints = _complaints(found, tolerance, max_kl)
    if as_json:
        record = {
            "a": a, "b": b, "passed": not complaints, "complaints": complaints, "max_abs": found.max_abs,
            "max_rel": found.max_rel, "max_kl": found.max_kl, "same_top": found.same_top, **asdict(found),
        }  # fmt: skip
        print(json.dumps(finite(record), indent=1))
    else:
        print("\n".join(_lines(found)))
    itself = "; A and B are one file: nothing was compared with another" if _one_file(a, b) else ""
    if complaints:
        say(f"compare-logits: FAIL: {'; '.join(complaints)}{itself}; next: k3ray conform names the first layer "
            "that differs from the reference")  # fmt: skip
        raise typer.Exit(1)
    verdict = "equal in every bit" if found.bitwise else "within what is tolerated"
    say(f"compare-logits: PASS: {counted(len(found.rows), 'row')} {verdict}{itself}")


def _one_file(a: str, b: str) -> bool:
    one, other = Path(a), Path(b)
    return a == b or (one.exists() and other.exists() and one.samefile(other))


def _complaints(found: LogitsDifference, tolerance: float | None, max_kl: float | None) -> list[str]:
    if tolerance is None and max_kl is None:
        told = "; give --tolerance to compare with another program (the goldens': 2e-3)"
        return [] if found.bitwise else [f"not equal in every bit, and no tolerance was given{told}"]
    complaints = []
    if tolerance is not None and found.max_abs > tolerance:
        complaints.append(f"largest difference {found.max_abs:.3e} is over --tolerance {tolerance:g}")
    if max_kl is not None and found.max_kl > max_kl:
        complaints.append(f"divergence {found.max_kl:.3e} is over --max-kl {max_kl:g}")
    return complaints


def _lines(found: LogitsDifference) -> list[str]:
    rows, total = len(found.rows), len(found.rows) * found.shape[-1]
    worst = found.worst
    shared = sum(row.top_shared for row in found.rows) / (rows * min(TOP, found.shape[-1]))
    equal = "equal in every bit" if found.bitwise else f"{found.differing} of {total} values differ"
    if not found.bitwise and not found.differing:
        equal = "equal in value, not in bits (another float type, or signed zeros)"
    ranks = ", ".join(f"{token_id} -> {rank + 1}" for token_id, rank in zip(worst.top_ids, worst.ranks, strict=True))
    return [
        f"shape          {found.shape}: {equal}",
        f"max abs        {found.max_abs:.6e}  (row {worst.row}, id {worst.worst_id})",
        f"max rel        {found.max_rel:.6e}  (largest difference of a row / largest |A| of that row)",
        f"KL(A||B)       {max(row.kl_ab for row in found.rows):.6e} nats in the worst row",
        f"KL(B||A)       {max(row.kl_ba for row in found.rows):.6e} nats in the worst row",
        f"top-1          {found.same_top} of {rows} rows choose the same id",
        f"top-{TOP}          {shared:.1%} of A's top {TOP} are among B's top {TOP}",
        f"ranks in B     of A's top ids in row {worst.row}: {ranks}",
    ]
