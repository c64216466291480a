"""An audit's snapshot as tables for a terminal: what disagrees first, then every view, each row with its kind."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from k3ray.audit.snapshot import KINDS, Snapshot, Statement, StatisticRow, View

VIEWS: dict[View, str] = {
    "layers": "layers",
    "tensors": "tensors and files",
    "parameters": "parameters",
    "boundary": "executed here, and unresolved",
}
_MARKS = {True: "agrees", False: "DISAGREES", None: ""}
PLAIN_WIDTH = 140


def print_snapshot(snapshot: Snapshot) -> None:
    """Print the tables to standard output."""
    console = Console(width=None if Console().is_terminal else PLAIN_WIDTH, highlight=False)
    console.print("kinds: " + ", ".join(f"{letter} {meaning}" for letter, meaning in KINDS.items()))
    if snapshot.disagreements:
        console.print(_statements("DISAGREES", snapshot.disagreements))
    for view, title in VIEWS.items():
        chosen = [statement for statement in snapshot.statements if statement.view == view]
        if chosen:
            console.print(_statements(title, sorted(chosen, key=lambda statement: not statement.main)))
    if snapshot.statistics:
        console.print(_statistics(snapshot.statistics))
    if snapshot.probe is not None:
        console.print(_probe(snapshot))


def _statements(title: str, statements: Iterable[Statement]) -> Table:
    table = Table(title=title, title_justify="left", show_lines=False)
    table.add_column("")
    table.add_column("what", ratio=2)
    table.add_column("found; expected where it differs", ratio=3)
    table.add_column("")
    for statement in statements:
        found = statement.found
        if statement.expected and statement.expected != found:
            found += f"\nexpected: {statement.expected}"
        table.add_row(statement.kind, _plain(statement.subject), _plain(found), _MARKS[statement.agrees])
    return table


def _plain(text: str) -> Text:
    """Text of others' as it is, neither markup nor able to steer the terminal."""
    lines = (
        "".join(mark if mark.isprintable() else f"\\x{ord(mark):02x}" for mark in line) for line in text.split("\n")
    )
    return Text("\n".join(lines))


def _statistics(rows: Iterable[StatisticRow]) -> Table:
    table = Table("", "statistics", title="statistics of small tensors", title_justify="left")
    for title in ("count", "median", "p10", "p90", "min", "max"):
        table.add_column(title, justify="right")
    table.add_column("further")
    table.add_column("by")
    for row in rows:
        figures = [_figure(value) for value in (row.median, row.p10, row.p90, row.minimum, row.maximum)]
        table.add_row(row.letter, _plain(row.subject), f"{row.count:,}", *figures, _plain(_further(row.extra)), row.by)
    return table


def _further(extra: dict[str, float]) -> str:
    """The further figures, the first word of their names said once where all have it."""
    first = {name.split(" ")[0] for name in extra}
    prefix = f"{first.pop()} " if len(first) == 1 and len(extra) > 1 else ""
    return prefix + ", ".join(f"{name.removeprefix(prefix)} {value:.4g}" for name, value in extra.items())


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


def _probe(snapshot: Snapshot) -> Table:
    probe = snapshot.probe
    assert probe is not None
    title = f"router stress probe, synthetic: {probe.inputs:,} isotropic inputs of RMS {probe.rms:g}, seed {probe.seed}"
    table = Table("", "layer", title=title, title_justify="left")
    for name in ("load CV", "Gini", "without load", "CV, no bias", "Gini, no bias", "without load, no bias", "overlap"):
        table.add_column(name, justify="right")
    for row in probe.layers:
        loads = [
            text
            for load in (row.with_bias, row.without_bias)
            for text in (f"{load.cv:.3f}", f"{load.gini:.3f}", str(load.without_load))
        ]
        table.add_row(probe.kind, str(row.layer), *loads, f"{row.overlap:.3f}")
    return table
