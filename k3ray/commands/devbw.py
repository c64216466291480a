"""k3ray devbw: how fast a disk gives what the engine reads, and how fast memory is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from k3ray.amounts import decimal_size
from k3ray.cluster.devices import (
    DiskSpeed,
    MemorySpeed,
    measurable_files,
    measure_disk,
    measure_memory,
    written_file,
)
from k3ray.cluster.machine import default_threads, physical_cores
from k3ray.commands.terminal import Progress, say
from k3ray.environment import read_environment
from k3ray.workers.counted import counted


def run(path: Path, write: bool, as_json: bool) -> None:
    """Measure for about ten seconds. write: make a temporary file in the folder `path` and read that."""
    if write:
        with Progress("writing a test file") as progress, written_file(path, progress=progress.update) as file:
            files, disk = [file], measure_disk([file], say=say)
    else:
        files = measurable_files(path)
        disk = measure_disk(files, say=say)
    memory = measure_memory(read_environment().threads or default_threads(), physical_cores())
    if as_json:
        speeds = [{**asdict(speed), "bytes_per_s": speed.bytes_per_s} for speed in disk]
        print(json.dumps({"files": [str(file) for file in files], "disk": speeds, "memory": asdict(memory)}, indent=1))
    else:
        console = Console(width=None if Console().is_terminal else 110)
        console.print(disk_table(disk))
        console.print(memory_table(memory))
    best = max(disk, key=lambda speed: speed.bytes_per_s)
    say(
        f"read {decimal_size(sum(speed.bytes_read for speed in disk))} of {counted(len(files), 'file')}: "
        f"{best.bytes_per_s / 1e9:.2f} GB/s at best; next: k3ray doctor MODEL_DIR, what that makes of a token"
    )


def disk_table(disk: Sequence[DiskSpeed]) -> Table:
    """A row a figure."""
    table = Table("random reads of", "bytes", "at a time", "read", "GB/s", "how", title="disk")
    for speed in disk:
        how = "past the page cache" if speed.direct else "through the page cache: may be its speed"
        table.add_row(
            f"{speed.kind}s", f"{speed.piece_bytes:,}", str(speed.depth), decimal_size(speed.bytes_read),
            f"{speed.bytes_per_s / 1e9:.2f}", how,
        )  # fmt: skip
    return table


def memory_table(memory: MemorySpeed) -> Table:
    """The three ways of reading memory."""
    table = Table("reading memory", "GB/s", title=f"memory, {counted(memory.threads, 'thread')}")
    table.add_row("plainly (numpy: the memory gives no less)", f"{memory.read_bytes_per_s / 1e9:.2f}")
    table.add_row("as trunk (bf16 rows, one token)", f"{memory.trunk_bytes_per_s / 1e9:.2f}")
    table.add_row("as experts (MXFP4 rows, one token)", f"{memory.expert_bytes_per_s / 1e9:.2f}")
    return table
