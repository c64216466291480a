"""How fast a node's memory and disks are: measured for a few seconds when asked, kept in our cache with the date.

Kept for each device and each number of threads, so that a plan made tomorrow need not measure again.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from k3ray.cluster.devices import (
    CHUNK,
    EXPERT,
    DeviceFailure,
    device_name,
    measurable_files,
    measure_disk,
    measure_memory,
)
from k3ray.cluster.topology import NodeSpeeds
from k3ray.workers.checkpoint.index_cache import usable_directory
from k3ray.workers.failure import Failure
from k3ray.workers.tape.manifest import TAPE_NAME

SECONDS = 0.5  # of each figure of a disk
DEPTH = 16  # the engine reads ahead
MEMORY_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes a second by what was read, and the day."""

    day: str
    rates: dict[str, float]


def node_speeds(
    models: Sequence[Path],
    tapes: Sequence[Path],
    threads: int,
    cores: Sequence[int],
    measure: bool,
    folder: Path | None = None,
) -> NodeSpeeds:
    """The kept figures, or new ones (about five seconds); of several disks of one kind the slowest counts.

    A disk without a file that is long enough, or one that fails, has no figure. folder: where they are kept, the
    cache of k3ray unless given.
    """
    folder = folder or speeds_folder()
    memory = _kept_or(folder, f"memory-{threads}", measure, lambda: _memory(threads, cores))
    experts = [_disk(folder, path, EXPERT, measure) for path in models]
    chunks = [_disk(folder, path / TAPE_NAME, CHUNK, measure) for path in tapes]
    chunks = chunks or [_disk(folder, path, CHUNK, measure) for path in models]
    days = sorted({found.day for found in (memory, *experts, *chunks) if found is not None})
    rates = {} if memory is None else memory.rates
    return NodeSpeeds(
        " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "not measured",
        rates.get("read"), rates.get("trunk"), rates.get("experts"), _slowest(chunks, CHUNK), _slowest(experts, EXPERT),
    )  # fmt: skip


def speeds_folder() -> Path | None:
    """Where figures are kept; None where nothing can be."""
    user = Path(tempfile.gettempdir()) / f"k3ray-{os.geteuid()}" / "speeds"
    return usable_directory([platformdirs.user_cache_path("k3ray") / "speeds", user])


def _slowest(found: Sequence[Measured | None], kind: str) -> float | None:
    return min((one.rates[kind] for one in found if one is not None and kind in one.rates), default=None)


def _memory(threads: int, cores: Sequence[int]) -> dict[str, float]:
    speed = measure_memory(threads, cores, MEMORY_BYTES)
    return {"read": speed.read_bytes_per_s, "trunk": speed.trunk_bytes_per_s, "experts": speed.expert_bytes_per_s}


def _disk(folder: Path | None, path: Path, kind: str, measure: bool) -> Measured | None:
    """Of the device under the path, for reads of this kind; None where there is no figure and none can be made."""

    def read() -> dict[str, float]:
        speeds = measure_disk(measurable_files(path), SECONDS, kinds=(kind,), depths=(DEPTH,))
        return {kind: speeds[0].bytes_per_s}

    try:
        device = device_name(path)
        return _kept_or(folder, f"disk-{device}-{kind}", measure, read)
    except (DeviceFailure, Failure, OSError):
        return None


def _kept_or(folder: Path | None, name: str, measure: bool, read: Callable[[], dict[str, float]]) -> Measured | None:
    """What is kept under the name, or, with `measure`, what `read` finds, kept from now on."""
    place = None if folder is None else folder / f"{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}.json"
    if not measure:
        return _kept(place, name)
    found = Measured(datetime.datetime.now(tz=datetime.UTC).date().isoformat(), read())
    if place is not None:
        with suppress(OSError):
            beside = place.with_name(f".{place.name}.{os.getpid()}")
            beside.write_text(json.dumps({"what": name, "day": found.day, "rates": found.rates}))
            beside.replace(place)
    return found


def _kept(place: Path | None, name: str) -> Measured | None:
    """A kept record; a damaged one counts as none."""
    if place is None:
        return None
    try:
        record = json.loads(place.read_text())
        rates = {str(kind): float(rate) for kind, rate in record["rates"].items()}
        day = datetime.date.fromisoformat(record["day"]).isoformat()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return Measured(day, rates) if record["what"] == name and all(rate > 0 for rate in rates.values()) else None
