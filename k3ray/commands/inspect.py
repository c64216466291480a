"""k3ray inspect: the census of a checkpoint, as tables or as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from k3ray.amounts import decimal_size
from k3ray.commands.terminal import say
from k3ray.environment import read_environment
from k3ray.model_source import find_model
from k3ray.workers.checkpoint.census import Census, read_census
from k3ray.workers.counted import counted


def run(model_dir: Path | None, as_json: bool) -> None:
    """Read the checkpoint's headers (or its cached index), bind the text model, print what was found."""
    source = find_model(model_dir, None, read_environment())
    say(source.describe())
    census = read_census(source.model_dir)
    if as_json:
        print(json.dumps(asdict(census), indent=1))
        return
    console = Console(width=None if Console().is_terminal else 110)
    groups = {name: decimal_size(count) for name, count in census.bytes_by_group.items()}
    for title, rows in (
        ("what it is", _facts(census)),
        ("entries by kind", census.objects),
        ("left alone by the text model", {**census.left, "all": census.num_left}),
        ("bytes of the text model", {**groups, "all": decimal_size(census.bound_bytes)}),
    ):
        console.print(f"\n{title}", highlight=False)
        console.print(_table(rows))
    for observation in census.observations:
        console.print(f"note: {observation}", soft_wrap=True, highlight=False, markup=False)
    ready = f"k3ray generate {source.model_dir} --ids 1,2,3"
    next_step = ready if census.shapes_checked else "put the shards into this folder and inspect it again"
    say(f"bound: {counted(census.num_bound, 'tensor')}, nothing missing; next: {next_step}")


def _facts(census: Census) -> dict[str, object]:
    data = "unknown: names only" if census.tensor_bytes is None else f"{census.tensor_bytes:,}"
    return {
        "layers": f"{census.num_layers}: {census.num_kda_layers} KDA, {census.num_mla_layers} MLA, "
        f"{census.num_moe_layers} with experts",
        "experts": f"{census.num_experts:,} of {census.expert_bytes:,} bytes",
        "shards": f"{census.num_shards}, {census.file_bytes:,} bytes of files",
        "tensor entries": f"{census.num_tensors:,}",
        "bytes of tensors": data,
        "names under": census.prefix,
        "bound, left": f"{census.num_bound:,}, {census.num_left:,}",
        "used by a token": f"trunk {decimal_size(census.trunk_bytes)}, "
        f"experts {decimal_size(census.expert_bytes_per_token)}",
    }


def _table(rows: Mapping[str, object]) -> Table:
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in rows.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
    return table
