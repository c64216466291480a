"""Options that several commands share, and how their values are understood."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

WISHES = "k3ray.wishes"


def whole_number(text: str) -> int:
    """Return the whole number that an option was given."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"found {text!r}, expected a whole number") from None


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
    typer.Argument(help="The checkpoint's folder. Default: K3_MODEL_DIR, else the embedded model.", show_default=False),
]
Config = Annotated[Path | None, typer.Option(help="A config.json elsewhere than in MODEL_DIR.", show_default=False)]
Tape = Annotated[Path | None, typer.Option(help="What k3ray pack wrote, to stream the trunk from.", show_default=False)]
Stages = Annotated[int, typer.Option(parser=whole_number, metavar="N", help="Processes that share the layers.")]
ExpertShards = Annotated[
    int,
    typer.Option(
        parser=whole_number, metavar="N", help="Processes that hold the routed experts; 0: the stages hold them."
    ),
]
StagesWish = Annotated[
    int | None,
    typer.Option(
        parser=whole_number,
        metavar="N",
        help="Processes that share the layers. Default: 1; in a cluster one each node.",
        show_default=False,
    ),
]
ExpertShardsWish = Annotated[
    int | None,
    typer.Option(
        parser=whole_number,
        metavar="N",
        help="Processes that hold the routed experts; 0: the stages hold them. Default: 0; in a cluster one each node.",
        show_default=False,
    ),
]
Roots = Annotated[
    Path | None,
    typer.Option(help="A TOML file: which folders of which node hold model and tape.", show_default=False),
]
Memory = Annotated[
    str | None, typer.Option(callback=note_wish, help="Memory of all processes here, like 24G.", show_default=False)
]
Preset = Annotated[
    str | None,
    typer.Option(
        callback=note_wish,
        help="Memory by name: ultra, laptop, desktop, workstation, server, max, auto.",
        show_default=False,
    ),
]
TrunkGb = Annotated[
    str | None,
    typer.Option(callback=note_wish, help="Gigabytes of trunk to keep in memory, or auto.", show_default=False),
]
CacheGb = Annotated[
    str | None, typer.Option(callback=note_wish, help="Gigabytes of experts to keep in memory.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
