"""A conformance run as text: a line a layer for the terminal, everything compared for the log, JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from k3ray.conform.comparison import ChosenOtherwise, Comparison, ExpertChoice
from k3ray.conform.conformance import LayerReport

HEADER = f"{'':6} {'what':12} {'kind':12} {'max abs':>9} {'max rel':>9} {'tolerance':>9}  {'experts':18} worst at"


def table_line(report: LayerReport) -> str:
    """Return the line of one layer: its figures are those of the array that came closest to its tolerance or failed."""
    verdict = "PASS" if report.passed else "FAIL"
    start = f"{verdict:6} {report.name:12} {report.kind:12}"
    worst = report.worst
    if worst is None:
        return f"{start} {report.problem}"
    experts = report.experts.describe() if report.experts else "-"
    figures = f"{worst.max_abs:9.1e} {worst.max_rel:9.1e} {worst.tolerance:9.1e}"
    failures = len(report.failures)
    others = f" (first of {failures} beyond tolerance)" if failures > 1 else ""
    problem = f"; {report.problem}" if report.problem else ""
    return f"{start} {figures}  {experts:18} {place(worst)}{others}{problem}"


def place(found: Comparison) -> str:
    """Return where the largest error is, like attn_out of token 3, channel 17."""
    against = "" if found.against == "reference" else f" against {found.against}"
    row = "head" if found.name == "matrices" else "row" if found.name.startswith("tail") else "token"
    return f"{found.name}{against}, {row} {found.row} [{found.column}]"


def log_lines(report: LayerReport) -> list[str]:
    """Return everything about one layer, for the log."""
    pieces = "+".join(map(str, report.pieces))
    lines = [
        f"{report.name} ({report.kind}): {'PASS' if report.passed else 'FAIL'}",
        f"  fed with: {report.source}; {report.tokens} tokens, ours in pieces of {pieces or '-'}, the reference at "
        f"once; {report.experts_read} expert reads, {report.seconds:.1f} s",
    ]
    if report.problem:
        lines.append(f"  problem: {report.problem}")
    if report.comparisons:
        lines.append(f"  {'':4} {'array':18} {'against':22} {'max abs':>9} {'max rel':>9} {'tolerance':>9}  worst at")
    for found in report.comparisons:
        lines.append(
            f"  {'ok' if found.passed else 'FAIL':4} {found.name:18} {found.against:22} {found.max_abs:9.2e} "
            f"{found.max_rel:9.2e} {found.tolerance:9.1e}  {place(found).split(', ')[-1]}"
        )
    return lines + ([] if report.experts is None else _expert_lines(report.experts))


def _expert_lines(choice: ExpertChoice) -> list[str]:
    lines = [
        f"  experts: {choice.equal} of {choice.tokens} tokens chose the same; the closest call was decided by "
        f"{choice.closest:.1e} of selection score; up to {choice.tie_margin:.0e} counts as a near tie"
    ]
    lines += [f"  near tie: {_otherwise(other)}; the reference went on with ours" for other in choice.near_ties]
    return lines + [f"  FAIL experts: {_otherwise(other)}" for other in choice.wrong]


def _otherwise(other: ChosenOtherwise) -> str:
    return f"token {other.token}: ours {list(other.ours)}, reference {list(other.theirs)}, margin {other.margin:.2e}"


def conclusion(reports: Sequence[LayerReport]) -> str:
    """Return the last line: how many passed, the largest error, near ties."""
    if not reports:
        return "conform: nothing was compared"
    failed = [report.name for report in reports if not report.passed]
    ties = sum(len(report.experts.near_ties) for report in reports if report.experts)
    rounding = [found for report in reports for found in report.comparisons if found.against == "reference"]
    largest = max((found.max_rel for found in rounding), default=math.nan)
    counted = f"largest relative error against the reference {largest:.1e}, {ties} near ties between experts"
    if failed:
        return f"conform: {len(failed)} of {len(reports)} FAIL: {', '.join(failed)}; {counted}"
    return f"conform: all {len(reports)} PASS; {counted}"


def as_json(reports: Sequence[LayerReport], about: dict[str, Any]) -> dict[str, Any]:
    """Return what --json prints; an infinite error is null."""
    layers = [{"passed": report.passed, **asdict(report)} for report in reports]
    passed = bool(reports) and all(report.passed for report in reports)
    record: dict[str, Any] = finite({"passed": passed, **about, "reports": layers})
    return record


def finite(value: Any) -> Any:
    """The same for JSON, which knows neither NaN nor infinity: None in their place."""
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
