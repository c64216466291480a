"""Options that several commands share, and how their values are understood."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

WISHES = "k3ray.wishes"


def _number(text: str) -> int:
    """Return the whole number that an option was given."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"found {text!r}, expected a whole number") from None


def number_option(text: str, metavar: str = "N") -> Any:
    """Return an option that takes a whole number; text: its help."""
    return typer.Option(parser=_number, metavar=metavar, help=text)


def note_wish(context: typer.Context, option: typer.CallbackParam, value: str | None) -> str | None:
    """Keep a memory option with its place on the command line: a later one wins over an earlier one."""
    if value is not None:
        context.meta.setdefault(WISHES, []).append((option.opts[0], value))
    return value


def wishes_of(context: typer.Context) -> tuple[tuple[str, str], ...]:
    """Return the memory options in the order in which they were given."""
    return tuple(context.meta.get(WISHES, ()))


ModelDir = Annotated[
    Path | None,
    typer.Argument(
        metavar="MODEL_DIR", help="The checkpoint's folder. Default: K3_MODEL_DIR, else the embedded model."
    ),
]
Config = Annotated[Path | None, typer.Option(help="A config.json elsewhere than in MODEL_DIR.")]
Tape = Annotated[Path | None, typer.Option(help="What k3ray pack wrote, to stream the trunk from.")]
Stages = Annotated[int, number_option("Processes that share the layers.")]
ExpertShards = Annotated[
    int,
    number_option("Processes that hold the routed experts; 0: the stages hold them."),
]
StagesWish = Annotated[
    int | None,
    number_option("Processes that share the layers. Default: 1; in a cluster as in k3ray plan."),
]
ExpertShardsWish = Annotated[
    int | None,
    number_option(
        "Processes that hold the routed experts; 0: the stages hold them. Default: 0; in a cluster as in k3ray plan."
    ),
]
Roots = Annotated[
    Path | None,
    typer.Option(help="A TOML file: which folders of which node hold model and tape."),
]
Memory = Annotated[
    str | None, typer.Option(callback=note_wish, help="Memory of all our processes on a machine, like 24G.")
]
Preset = Annotated[
    str | None,
    typer.Option(callback=note_wish, help="Memory by name: ultra, laptop, desktop, workstation, server, max, auto."),
]
TrunkGb = Annotated[
    str | None,
    typer.Option(callback=note_wish, help="Gigabytes of trunk to keep in memory, or auto."),
]
CacheGb = Annotated[str | None, typer.Option(callback=note_wish, help="Gigabytes of experts to keep in memory.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
