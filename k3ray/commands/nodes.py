"""k3ray nodes: every node of the cluster in one table, what it has and why it would be left out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import typer
from rich.table import Table

from k3ray.cluster.budget_plan import gigabytes
from k3ray.cluster.memory_parts import ACTOR_BYTES
from k3ray.cluster.topology import COMPARED_VERSIONS, NodeFacts, NodeSpeeds, Verdict
from k3ray.commands.budget import wide_console
from k3ray.commands.terminal import say
from k3ray.environment import read_environment
from k3ray.model_source import find_model
from k3ray.nodes import Nodes, find_nodes
from k3ray.workers.counted import counted

TABLE_WIDTH = 80  # characters below which the table's nine columns cannot be read


def run(model_dir: Path | None, tape: Path | None, roots: Path | None, measure: bool, as_json: bool) -> None:
    """Ask every node and compare; raises typer.Exit(1) where a node is left out, since a run should not surprise."""
    environment = read_environment()
    source = find_model(model_dir, None, environment)
    say(source.describe())
    if measure:
        say("measuring memory, the engine's speeds and disks of every node, for ten to thirty seconds")
    nodes = find_nodes(environment, source.model_dir, tape, roots, measure, say)
    if as_json:
        records = [{**asdict(one.node), "usable": one.usable, "reasons": one.reasons} for one in nodes.verdicts]
        print(json.dumps({"nodes": records}, indent=1))
    else:
        print_nodes(nodes.verdicts)
    say(conclusion(nodes, source.model_dir))
    if not all(one.usable for one in nodes.verdicts):
        raise typer.Exit(1)


def conclusion(nodes: Nodes, model_dir: Path) -> str:
    """The last line: how many take part with how much, which of them have nothing to give, and what comes next."""
    left_out = [one.node.name for one in nodes.verdicts if not one.usable]
    count = len(nodes.usable)
    which = "the one node" if count == 1 else f"all {count} nodes"
    which = f"{count} of {counted(len(nodes.verdicts), 'node')}" if left_out else which
    with_memory = f"with {gigabytes(sum(node.available_bytes for node in nodes.usable))}"
    empty = [node.name for node in nodes.usable if node.available_bytes < ACTOR_BYTES]
    if empty:
        have = "has" if len(empty) == 1 else "have"
        with_memory += f", of which {len(empty)} {have} no memory left for a part of any model: {', '.join(empty)}"
    if left_out:
        return f"{which} can take part, {with_memory}; left out: {', '.join(left_out)}; the reasons are above"
    return f"{which} can take part, {with_memory}; next: k3ray plan {model_dir}"


def print_nodes(verdicts: Sequence[Verdict]) -> None:
    """The table, or in a terminal too narrow for it the same line by line; and under it the reasons in full."""
    console = wide_console()
    table = nodes_table(verdicts)
    if console.width >= TABLE_WIDTH:
        console.print(table)
    else:
        for cells in zip(*(column.cells for column in table.columns), strict=True):
            console.print(f"[bold]{cells[0]}[/] {cells[1]}", soft_wrap=True)
            for column, cell in zip(table.columns[2:], cells[2:], strict=True):
                if cell:
                    console.print(f"  {column.header}: {cell}", highlight=False, soft_wrap=True)
    for one in verdicts:
        for reason in one.reasons:
            console.print(f"{one.node.name}: left out: {reason}", highlight=False, markup=False, soft_wrap=True)


def nodes_table(verdicts: Sequence[Verdict]) -> Table:
    """A row a node."""
    table = Table("node", "", "cores", "memory nodes", "memory, by", "GB/s: memory, disk", "versions", "model", "tape")
    for one in verdicts:
        node, level = one.node, "[green]ok[/]" if one.usable else "[red]left out[/]"
        name = f"{node.name} (here)" if node.driver else node.name
        if node.problem:
            table.add_row(name, level, *[""] * 7)
            continue
        table.add_row(
            name,
            level,
            f"{len(node.cores)} of {node.cpus}",
            ", ".join(counted(len(place.cores), "core") for place in node.numa),
            f"{gigabytes(node.available_bytes)}, {node.decided_by}",
            speeds_text(node.speeds),
            " ".join(f"{name} {dict(node.versions).get(name, 'missing')}" for name in COMPARED_VERSIONS),
            "; ".join(_model_text(node)) or "none",
            "; ".join(f"{tape.path}: {'no' if tape.problem else tape.fingerprint[:8]}" for tape in node.tapes)
            or "none",
        )
    return table


def speeds_text(speeds: NodeSpeeds) -> str:
    """What was measured, with its date."""
    known = [rate for rate in (speeds.read, speeds.disk_experts, speeds.disk_chunks) if rate is not None]
    if not known:
        return "not measured: --measure"
    texts = [f"{rate / 1e9:.1f}" if rate else "?" for rate in (speeds.read, speeds.disk_chunks or speeds.disk_experts)]
    return f"{', '.join(texts)} ({speeds.measured})"


def _model_text(node: NodeFacts) -> list[str]:
    """Every copy: its fingerprint if it is whole, how many layers if not."""
    found = []
    for copy in node.models:
        what = "no" if copy.problem else copy.fingerprint[:8] if copy.whole else counted(len(copy.layers), "layer")
        found.append(f"{copy.path}: {what}")
    return found
