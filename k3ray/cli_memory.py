"""The options of the commands about memory, disks and caches."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from k3ray.cli_options import (
    CacheGb,
    Config,
    ExpertShards,
    Json,
    Memory,
    ModelDir,
    Preset,
    Stages,
    Tape,
    TrunkGb,
    number_option,
    wishes_of,
)


def pack(
    model_dir: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="The checkpoint's folder.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make for the tape.")],
    config: Config = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare every bit of the tape with the shards.")] = False,
) -> None:
    """Pack the trunk and the head in the order of their use, to be streamed from a disk."""
    from k3ray.commands.pack import run

    run(model_dir, out, verify, config)


def budget(
    context: typer.Context,
    model_dir: ModelDir = None,
    memory: Memory = None,
    preset: Preset = None,
    trunk_gb: TrunkGb = None,
    cache_gb: CacheGb = None,
    stages: Stages = 1,
    expert_shards: ExpertShards = 0,
    positions: Annotated[int, number_option("Prompt and generated tokens together.")] = 1024,
    tape: Tape = None,
    json: Json = False,
) -> None:
    """Show where a model's bytes are, what each preset does, and the plan for what is asked."""
    from k3ray.commands.budget import run

    run(model_dir, wishes_of(context), stages, expert_shards, positions, tape, json)


def doctor(model_dir: ModelDir = None, tape: Tape = None, json: Json = False) -> None:
    """Look at this machine and model: what is missing, what fits, how fast it will be, what to type next."""
    from k3ray.commands.doctor import run

    run(model_dir, tape, json)


def devbw(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A file, or a folder whose largest files are read.")],
    write: Annotated[
        bool, typer.Option("--write", help="Write a temporary file into the folder and read that.")
    ] = False,
    json: Json = False,
) -> None:
    """Measure a disk as the engine reads it, and the memory, for about ten seconds."""
    from k3ray.commands.devbw import run

    run(path, write, json)


def simulate_cache(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A recorded trace: see generate --dump-cache-trace.")],
    capacity: Annotated[list[str] | None, typer.Option(help="A cache size, like 8GB; may be given again.")] = None,
    order: Annotated[str, typer.Option(help="decoding: a token at a time; recorded: as it was.")] = "decoding",
    expert_bytes: Annotated[int, number_option("Bytes of one expert.")] = 17_547_264,
    experts_per_token: Annotated[
        int | None,
        number_option("Experts of a token; found out if not given."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the hit rates into this PNG.")] = None,
    json: Json = False,
) -> None:
    """Replay a recorded trace with LRU, k3ray's policy and the optimum at several cache sizes."""
    from k3ray.commands.simulate_cache import run

    run(trace, capacity or [], order, expert_bytes, experts_per_token, plot, json)
