"""k3ray budget: where a model's bytes go, what each preset would do here, and one plan process by process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from k3ray.amounts import decimal_size
from k3ray.cluster.budget import plan_budget
from k3ray.cluster.budget_plan import PINNED, BudgetPlan, HostRun, gigabytes, host_run
from k3ray.cluster.machine import MemoryLimits, default_threads, memory_limits
from k3ray.cluster.memory_parts import expert_bytes, position_bytes
from k3ray.cluster.plan import make_plan
from k3ray.cluster.preset_rows import PresetRow, preset_rows
from k3ray.cluster.wishes import merge_wishes
from k3ray.commands.terminal import say
from k3ray.environment import read_environment
from k3ray.model_source import find_model
from k3ray.workers.checkpoint.census import ATTENTION, DENSE, EMBEDDING, HEAD, REST, ROUTED, SHARED, Census, read_census
from k3ray.workers.failure import Failure
from k3ray.workers.loading import CheckpointSpec
from k3ray.workers.model.config import ModelConfig, read_config
from k3ray.workers.tape.layout import TapeLayout, plan_layout
from k3ray.workers.tape.manifest import read_manifest

MAX_POSITIONS = 1 << 24
TRUNK = "trunk: in memory, or streamed from the tape once a token"
HELD = {
    ROUTED: "read from the disk when a token asks for one and no slot has it",
    SHARED: TRUNK,
    ATTENTION: TRUNK,
    DENSE: TRUNK,
    REST: TRUNK + " (norms and biases: in memory)",
    HEAD: TRUNK,
    EMBEDDING: "read a row at a time, never held",
}


class PositionsFailure(Failure):
    """A number of positions that no sequence has."""

    exit_code = 2


def run(
    model_dir: Path | None,
    flags: Sequence[tuple[str, str]],
    stages: int,
    expert_shards: int,
    positions: int,
    tape: Path | None,
    as_json: bool,
) -> None:
    """Print the census by what happens to the bytes, the presets, and the plan that the flags ask for.

    flags: --memory, --preset, --trunk-gb and --cache-gb with their values, in the order given. Without a tape the plans
    are those of the tape that `k3ray pack` would make. Raises MemoryFailure when the flags' plan cannot hold.
    """
    if not 1 <= positions <= MAX_POSITIONS:
        raise PositionsFailure(f"--positions: found {positions}, expected 1 to {MAX_POSITIONS}")
    wishes = merge_wishes(flags)
    source = find_model(model_dir, None, read_environment())
    say(source.describe())
    config = read_config(source.model_dir)
    layout = read_layout(config, tape)
    spec = CheckpointSpec(source.model_dir, None, config.num_hidden_layers)
    threads = read_environment().threads or default_threads()
    placement = make_plan(spec, stages, expert_shards, threads, ())
    host, limits = host_run(config, placement, layout, positions), memory_limits()
    census, rows = read_census(source.model_dir), preset_rows(host, limits)
    if as_json:
        chosen = plan_budget(host, wishes, limits)
        record = {"bytes": census.bytes_by_group, "presets": [_as_json(row) for row in rows], "plan": plan_json(chosen)}
        print(json.dumps(record, indent=1))
    else:
        console = wide_console()
        _print_census(console, census, host)
        console.print(f"\nwhat each preset does, for {positions:,} positions", highlight=False)
        print_presets(console, rows)
        _print_arithmetic(console, host)
        chosen = plan_budget(host, wishes, limits)
        console.print(f"\nthe plan ({chosen.limit_said})", highlight=False)
        console.print(plan_table(chosen))
    say(f"{chosen.describe()}; next: {_next(source.model_dir, chosen, tape)}")


def read_layout(config: ModelConfig, tape: Path | None) -> TapeLayout:
    """The layout of a tape, or of the one that would be packed."""
    return plan_layout(config) if tape is None else plan_layout(config, read_manifest(tape).identity.chunk_bytes)


def wide_console() -> Console:
    """The terminal, or lines of a readable width where there is none."""
    return Console(width=None if Console().is_terminal else 120)


def list_presets(run_here: HostRun, limits: MemoryLimits) -> None:
    """Print the table of presets, for --list-presets of other commands."""
    print_presets(wide_console(), preset_rows(run_here, limits))


def print_presets(console: Console, rows: Sequence[PresetRow]) -> None:
    """What each preset takes, holds and reads, whether this host has it, and what it is for."""
    console.print(preset_table(rows))
    for row in rows:
        console.print(f"{row.name}: {row.reason}", highlight=False, soft_wrap=True)


def preset_table(rows: Sequence[PresetRow]) -> Table:
    """A row a preset."""
    table = Table("preset", "memory", "of it trunk", "experts held", "trunk a token", "experts, at most", "fits here")
    for column in table.columns[1:-1]:
        column.justify = "right"
    for row in rows:
        if row.plan is None:
            table.add_row(row.name, "", "", "", "", "", "no")
            continue
        plan = row.plan
        sizes = (plan.total_bytes, plan.parts().get(PINNED, 0), plan.trunk_bytes_per_token, plan.expert_bytes_per_token)
        total, trunk, *reads = map(gigabytes, sizes)
        slots = f"{plan.cache_slots:,} of {plan.owned_experts:,}"
        table.add_row(row.name, total, trunk, slots, *reads, "yes" if row.fits else "no")
    return table


def plan_table(plan: BudgetPlan) -> Table:
    """A column a process, a row a part; every byte of the plan is in it once."""
    actors = (*plan.stages, *plan.shards)
    columns = {"once": dict(plan.host_parts), **{actor.name: dict(actor.parts) for actor in actors}}
    if len(columns) > 6:
        columns = {"once": dict(plan.host_parts), f"all {len(actors)} processes": _summed(plan)}
    table = Table("part", *columns, "all")
    for column in table.columns[1:]:
        column.justify = "right"
    for part, total in plan.parts().items():
        table.add_row(part, *(_cell(parts.get(part)) for parts in columns.values()), _cell(total))
    table.add_section()
    table.add_row("total", *(_cell(sum(parts.values())) for parts in columns.values()), _cell(plan.total_bytes))
    return table


def plan_json(plan: BudgetPlan) -> dict[str, Any]:
    """The plan as a record, its sums included."""
    return {**asdict(plan), "total_bytes": plan.total_bytes, "parts": plan.parts()}


def _summed(plan: BudgetPlan) -> dict[str, int]:
    return {name: nbytes for name, nbytes in plan.parts().items() if name not in plan.host_parts}


def _as_json(row: PresetRow) -> dict[str, Any]:
    plan = None if row.plan is None else plan_json(row.plan)
    return {"name": row.name, "reason": row.reason, "fits": row.fits, "refused": row.refused, "plan": plan}


def _cell(nbytes: int | None) -> str:
    return "" if nbytes is None else decimal_size(nbytes)


def _print_census(console: Console, census: Census, run_here: HostRun) -> None:
    console.print("\nwhere the bytes go", highlight=False)
    table = Table("part", "bytes", "share", "what happens to it")
    for group, nbytes in census.bytes_by_group.items():
        share = f"{100 * nbytes / census.bound_bytes:.2f} %"
        table.add_row(group, decimal_size(nbytes), share, HELD[group] if nbytes else "")
    table.add_section()
    table.add_row("all", decimal_size(census.bound_bytes), "", "")
    console.print(table)
    config = run_here.config
    latents = position_bytes(config) * len(config.mla_layers)
    asked = len(config.moe_layers) * config.num_experts_per_token
    console.print(
        f"a position costs {latents:,} bytes over {len(config.mla_layers)} MLA layers; an expert is "
        f"{expert_bytes(config):,} bytes, and a token asks for {asked:,}",
        highlight=False,
        soft_wrap=True,
    )


def _print_arithmetic(console: Console, run_here: HostRun) -> None:
    """Why trunk comes first."""
    assert run_here.layout is not None
    config = run_here.config
    owned = sum(run_here.owned_experts) * expert_bytes(config)
    token = len(config.moe_layers) * config.num_experts_per_token * expert_bytes(config)
    chance = token / owned if owned else 0.0
    console.print(
        "\ntrunk first: a gigabyte of trunk in memory is a gigabyte that no token reads again; a gigabyte of expert "
        f"slots saves {chance:.3f} GB a token if experts are asked for at random ({gigabytes(token)} of "
        f"{gigabytes(owned)}), and more as far as they repeat",
        highlight=False,
        soft_wrap=True,
    )


def _next(model_dir: Path, plan: BudgetPlan, tape: Path | None) -> str:
    if plan.trunk_bytes_per_token and tape is None:
        return f"k3ray pack {model_dir} {model_dir}.tape"
    return f"k3ray generate {model_dir}{'' if tape is None else f' --tape {tape}'} --ids 1,2,3"
