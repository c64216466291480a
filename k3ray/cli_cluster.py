"""The options of the commands about several nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from k3ray.cli_options import Json, Memory, ModelDir, Preset, Roots, Tape, number_option, wishes_of

Measure = Annotated[bool, typer.Option("--measure", help="Measure memory and disks of every node now.")]


def nodes(
    model_dir: ModelDir = None,
    tape: Tape = None,
    roots: Roots = None,
    measure: Measure = False,
    json: Json = False,
) -> None:
    """Show every node of the cluster: memory, cores, speeds, versions, model; and which would be left out, and why."""
    from k3ray.commands.nodes import run

    run(model_dir, tape, roots, measure, json)


def plan(
    context: typer.Context,
    model_dir: ModelDir = None,
    cluster: Annotated[Path | None, typer.Option(help="Plan for the machines that this TOML file describes.")] = None,
    memory: Memory = None,
    preset: Preset = None,
    stages: Annotated[
        int | None,
        number_option("Stages in all. Default: one each seat."),
    ] = None,
    expert_shards: Annotated[
        int | None,
        number_option("Shards in all; 0: stages hold the experts."),
    ] = None,
    seats: Annotated[
        int | None,
        number_option("Seats of a node. Default: its memory nodes."),
    ] = None,
    positions: Annotated[int, number_option("Prompt and generated tokens together.")] = 4096,
    roots: Roots = None,
    tape: Tape = None,
    measure: Measure = False,
    out: Annotated[Path | None, typer.Option(help="Write the plan into this file.")] = None,
    json: Json = False,
) -> None:
    """Plan for the cluster at hand or for a described one: who gets what, and how long a token takes."""
    from k3ray.cluster.seats import ClusterWishes
    from k3ray.commands.plan import run

    wishes = ClusterWishes(stages, expert_shards, seats, positions=positions)
    run(model_dir, wishes, wishes_of(context), cluster, roots, tape, measure, out, json)
