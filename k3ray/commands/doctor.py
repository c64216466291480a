"""k3ray doctor: this machine and one model looked at, what to expect of them, and the next command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import typer
from rich.table import Table

from k3ray.cluster.budget_plan import gigabytes
from k3ray.cluster.devices import MemorySpeed, measure_memory
from k3ray.cluster.doctor import STOP, Finding, examine_host
from k3ray.cluster.forecast import Forecast
from k3ray.cluster.machine import default_threads, memory_limits, physical_cores
from k3ray.cluster.model_checkup import examine_disk, examine_model, examine_tape, model_run, next_step
from k3ray.cluster.node_speeds import speed_of_model
from k3ray.cluster.preset_rows import PresetRow, preset_rows
from k3ray.commands.budget import wide_console
from k3ray.commands.terminal import say
from k3ray.embedded_model import embedded_model_dir
from k3ray.environment import Environment, read_environment
from k3ray.model_source import ModelSource, find_model
from k3ray.workers.model.config import read_config
from k3ray.workers.tape.manifest import NoTape

POSITIONS = 4096  # of the forecast
STYLES = {"ok": "green", "note": "yellow", "stop": "red"}


def run(model_dir: Path | None, tape: Path | None, as_json: bool) -> None:
    """Look at everything, measure for about ten seconds; raises typer.Exit(1) when nothing can run."""
    environment = read_environment()
    source = find_model(model_dir, None, environment)
    if tape is not None and not tape.is_dir():
        raise NoTape(tape)
    say(source.describe())
    say("measuring for a few seconds")
    findings = examine_host(environment.ray_address)
    memory = measure_memory(environment.threads or default_threads(), physical_cores())
    findings.append(_memory_speed(memory))
    model_findings, rows = _model(source, tape, environment, memory)
    findings += model_findings
    if as_json:
        print(json.dumps({"findings": [asdict(item) for item in findings], "presets": _rows_json(rows)}, indent=1))
    else:
        console = wide_console()
        console.print(findings_table(findings))
        if rows:
            console.print(forecast_table(rows))
    stopped = [item for item in findings if item.level == STOP]
    if stopped:
        say("cannot run: " + "; ".join(f"{item.subject}: {item.found}: {item.advice}" for item in stopped))
        raise typer.Exit(1)
    say(f"next: {findings[-1].found}")


def findings_table(findings: Sequence[Finding]) -> Table:
    """A row a finding."""
    table = Table("looked at", "")
    for title in ("found", "what to do"):
        table.add_column(title, overflow="fold")
    for item in findings:
        table.add_row(item.subject, f"[{STYLES[item.level]}]{item.level}[/]", item.found, item.advice)
    return table


def forecast_table(rows: Sequence[PresetRow]) -> Table:
    """A row a preset that this host has memory for."""
    title = f"a token after the prompt, {POSITIONS:,} positions, as if no expert were ever asked for again"
    table = Table("preset", "memory", "a token reads", "disk", "kernels", "a token takes", "bound by", title=title)
    for row in rows:
        if row.plan is None:
            table.add_row(row.name, "no plan")
            continue
        size, reads = gigabytes(row.plan.total_bytes), gigabytes(row.plan.bytes_per_token)
        if not row.fits or row.forecast is None:
            table.add_row(row.name, size, reads, "", "", "" if row.fits else "too little memory here")
            continue
        expected = row.forecast
        cells = (_seconds(expected.disk_s), _seconds(expected.kernels_s), _seconds(expected.seconds))
        table.add_row(row.name, size, reads, *cells, expected.dominated_by)
    return table


def _model(
    source: ModelSource, tape: Path | None, environment: Environment, memory: MemorySpeed
) -> tuple[list[Finding], list[PresetRow]]:
    """What is found of the model, the next command last; no rows where its config cannot be read."""
    model_dir = source.model_dir
    finding, census = examine_model(model_dir)
    if census is None:
        return [finding], []
    config, limits, findings, layout = read_config(model_dir), memory_limits(), [finding], None
    if tape is not None:
        finding, layout = examine_tape(tape, config)
        findings.append(finding)
    disk_findings, disk = examine_disk(model_dir, None if layout is None else tape, say)
    findings += disk_findings
    here = model_run(config, layout, environment.threads or default_threads(), POSITIONS)
    named = "" if model_dir == embedded_model_dir() else str(model_dir)
    ask = "--ids 1,2,3" if source.tokenizer is None else "--prompt 'Hello'"
    findings.append(next_step(here, named, None if layout is None else tape, ask, limits))
    return findings, preset_rows(here, limits, disk, speed_of_model(memory, model_dir, config, physical_cores()))


def _memory_speed(memory: MemorySpeed) -> Finding:
    rates = (memory.read_bytes_per_s, memory.trunk_bytes_per_s, memory.expert_bytes_per_s)
    plain, trunk, experts = (f"{rate / 1e9:.1f} GB/s" for rate in rates)
    found = f"at least {plain} read plainly, {trunk} as trunk and {experts} as experts by {memory.threads} threads"
    return Finding("speed of memory", found)


def _rows_json(rows: Sequence[PresetRow]) -> list[dict[str, object]]:
    return [
        {
            "name": row.name,
            "fits": row.fits,
            "memory_bytes": None if row.plan is None else row.plan.total_bytes,
            "bytes_per_token": None if row.plan is None else row.plan.bytes_per_token,
            "forecast": None if row.forecast is None else _forecast_json(row.forecast),
        }
        for row in rows
    ]


def _forecast_json(expected: Forecast) -> dict[str, object]:
    return {**asdict(expected), "seconds": expected.seconds, "dominated_by": expected.dominated_by}


def _seconds(seconds: float | None) -> str:
    return "not measured" if seconds is None else f"{seconds:,.3f} s"
