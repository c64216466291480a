"""What the tests of proving a folder share: its shards, ways to damage them, and what a proof found."""

from __future__ import annotations

import json
import os
from pathlib import Path

from k3ray.download.verdict import FAIL, Verdict
from k3ray.download.verification import verify

ONE, TWO, THREE, FOUR, FIVE = (f"model-0000{number}-of-000005.safetensors" for number in range(1, 6))


def prove(directory: Path, deep: bool = False) -> Verdict:
    """Prove a folder; deep: every byte is read."""
    return verify(directory, deep, None, lambda done, total: None)


def statuses(verdict: Verdict) -> dict[str, str]:
    """How each check ended."""
    return {found.check: found.status for found in verdict.findings}


def failed(verdict: Verdict) -> dict[str, list[str]]:
    """The files of the problems of every check that failed."""
    return {f.check: [p.file for p in f.problems] for f in verdict.findings if f.status == FAIL}


def flip(path: Path, place: int, keep_time: bool = False) -> None:
    """Change one bit of a file; keep_time: its time of change stays."""
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    if keep_time:
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def resize(path: Path, by: int) -> None:
    """Change a file's size, growing or shrinking its last tensor's bytes."""
    data = path.read_bytes()
    path.write_bytes(data + bytes(by) if by > 0 else data[:by])


def swap(first: Path, second: Path) -> None:
    """Exchange two files, each with its time of change."""
    beside = first.with_name("beside")
    first.replace(beside)
    second.replace(first)
    beside.replace(second)


def pad_header(path: Path, count: int) -> None:
    """Make a shard longer by spaces after its header's JSON."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    path.write_bytes((length + count).to_bytes(8, "little") + data[8 : 8 + length] + b" " * count + data[8 + length :])


def break_scale(model: Path) -> str:
    """Make the last scale of one of the third shard's experts NaN; returns its tensor."""
    data = bytearray((model / THREE).read_bytes())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = next(name for name in header if name.endswith("w2.weight_scale"))
    data[8 + length + header[name]["data_offsets"][1] - 1] = 255
    (model / THREE).write_bytes(data)
    return str(name)
