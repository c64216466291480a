"""How fast a node's memory and disks are for a model: measured for some seconds when asked, kept in our cache.

The engine's own layers, experts and messages of that model's widths are timed, and reads of its own pieces, as many at
once as the engine makes. Kept with the day for each device, model and number of threads, so that a plan made tomorrow
need not measure again.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import platformdirs

from k3ray.cluster.devices import (
    CHUNK,
    EXPERT,
    PIECES,
    DeviceFailure,
    MemorySpeed,
    device_name,
    measurable_files,
    measure_bursts,
    measure_disk,
    measure_memory,
)
from k3ray.cluster.layer_speeds import measure_layers
from k3ray.cluster.machine import ROOT, affinity, memory_limits
from k3ray.cluster.memory_parts import expert_bytes
from k3ray.cluster.topology import NodeSpeeds, ThreadSpeeds
from k3ray.cluster.trip_speed import measure_trip
from k3ray.workers.checkpoint.index_cache import usable_directory
from k3ray.workers.experts import QUEUE_DEPTH
from k3ray.workers.failure import Failure
from k3ray.workers.half_written import beside, prefix_beside
from k3ray.workers.model.config import ModelConfig, read_config
from k3ray.workers.tape.manifest import TAPE_NAME, config_fields, read_manifest
from k3ray.workers.tape.source import DEFAULT_READERS

SECONDS = 1.0  # of each figure of a disk
DEPTHS = {CHUNK: DEFAULT_READERS, EXPERT: QUEUE_DEPTH}  # as many reads at once as the engine makes
RELEASED_BURST = 16  # experts of a token in a layer
MEMORY_BYTES = 128 << 20  # at least; else twice what the processors cache
MEMORY_SHARE = 4  # at most one part in so many of what is available


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes a second, or seconds, by what was measured, and the day."""

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
    """The kept figures, or new ones; of several disks of one kind the slowest counts.

    Without a model whose config can be read the kernels are measured at the released widths. A disk without a file that
    is long enough, or one that fails, has no figure. folder: where they are kept, the cache of k3ray unless given.
    """
    folder = folder or speeds_folder()
    model, config = _first_model(models)
    shape = "" if config is None else f"-{_digest(config)}"
    memory = _kept_or(folder, f"memory-{threads}{shape}", measure, lambda: _memory(model, config, threads, cores))
    pieces = _pieces(config, tapes)
    burst = RELEASED_BURST if config is None else config.num_experts_per_token
    experts = [_disk(folder, path, EXPERT, pieces[EXPERT], burst, measure) for path in models]
    chunks = [_disk(folder, path / TAPE_NAME, CHUNK, pieces[CHUNK], 0, measure) for path in tapes]
    chunks = chunks or [_disk(folder, path, CHUNK, pieces[CHUNK], 0, measure) for path in models]
    days = sorted({found.day for found in (memory, *experts, *chunks) if found is not None})
    rates = {} if memory is None else memory.rates
    return NodeSpeeds(
        measured=" to ".join(dict.fromkeys((days[0], days[-1]))) if days else "not measured",
        read=rates.get("read"),
        trunk=rates.get("trunk"),
        experts=rates.get("experts"),
        disk_chunks=_slowest(chunks, CHUNK),
        disk_experts=_slowest(experts, EXPERT),
        by_threads=tuple(
            ThreadSpeeds(count, rates[f"trunk {count}"], rates[f"experts {count}"])
            for count in measured_threads(threads)
            if {f"trunk {count}", f"experts {count}"} <= set(rates)
        ),
        trip_s=rates.get("trip"),
    )


def speeds_folder() -> Path | None:
    """Where figures are kept; None where nothing can be."""
    user = Path(tempfile.gettempdir()) / f"k3ray-{os.geteuid()}" / "speeds"
    return usable_directory([platformdirs.user_cache_path("k3ray") / "speeds", user])


def lent_bytes() -> int:
    """How large a piece of memory is measured over: more than the caches hold, and no more than there is room for."""
    return max(MEMORY_BYTES, min(memory_limits().available_bytes // MEMORY_SHARE, 2 * cached_bytes()))


def speed_of_model(memory: MemorySpeed, model: Path, config: ModelConfig, cores: Sequence[int]) -> MemorySpeed:
    """The same threads over this model's layers and experts; what the folder does not have stays as it is."""
    found = measure_layers(model, config, (memory.threads,), cores, lent_bytes())[0]
    return replace(
        memory,
        trunk_bytes_per_s=found.trunk_bytes_per_s or memory.trunk_bytes_per_s,
        expert_bytes_per_s=found.expert_bytes_per_s or memory.expert_bytes_per_s,
    )


def measured_threads(threads: int) -> tuple[int, ...]:
    """The numbers of threads that are measured: one, half of them, all."""
    return tuple(sorted({1, max(1, threads // 2), threads}))


def cached_bytes(root: Path = ROOT) -> int:
    """What the last caches of the processors hold together, of those that this process may use; 0 where not told."""
    found: dict[str, int] = {}
    for cpu in affinity():
        for cache in sorted((root / "sys/devices/system/cpu" / f"cpu{cpu}" / "cache").glob("index[0-9]*"))[-1:]:
            with suppress(OSError, ValueError):
                size = (cache / "size").read_text().strip()
                unit = {"K": 1 << 10, "M": 1 << 20}[size[-1]] if size[-1:] in ("K", "M") else 1
                found[(cache / "shared_cpu_list").read_text()] = int(size.rstrip("KM")) * unit
    return sum(found.values())


def _slowest(found: Sequence[Measured | None], kind: str) -> float | None:
    return min((one.rates[kind] for one in found if one is not None and kind in one.rates), default=None)


def _first_model(models: Sequence[Path]) -> tuple[Path | None, ModelConfig | None]:
    for path in models:
        with suppress(Failure, OSError):
            return path, read_config(path)
    return None, None


def _digest(config: ModelConfig) -> str:
    fields = msgspec.json.encode(sorted(config_fields(config).items()))
    return hashlib.blake2b(fields, digest_size=8).hexdigest()


def _pieces(config: ModelConfig | None, tapes: Sequence[Path]) -> dict[str, int]:
    """Bytes of a chunk of the first tape and of an expert of the model; of the released ones where there is none."""
    pieces = dict(PIECES)
    if config is not None and config.moe_layers:
        pieces[EXPERT] = expert_bytes(config)
    for path in tapes[:1]:
        with suppress(Failure, OSError):
            pieces[CHUNK] = read_manifest(path).identity.chunk_bytes
    return pieces


def _memory(model: Path | None, config: ModelConfig | None, threads: int, cores: Sequence[int]) -> dict[str, float]:
    nbytes = lent_bytes()
    speed = measure_memory(threads, cores, nbytes)
    rates = {"read": speed.read_bytes_per_s, "trunk": speed.trunk_bytes_per_s, "experts": speed.expert_bytes_per_s}
    if model is None or config is None:
        return rates
    for one in measure_layers(model, config, measured_threads(threads), cores, nbytes):
        if one.trunk_bytes_per_s is not None:
            rates[f"trunk {one.threads}"] = rates["trunk"] = one.trunk_bytes_per_s
        if one.expert_bytes_per_s is not None:
            rates[f"experts {one.threads}"] = rates["experts"] = one.expert_bytes_per_s
    trip_s = measure_trip(config.routed_expert_hidden_size, config.num_experts_per_token) if config.moe_layers else None
    return rates if trip_s is None else {**rates, "trip": trip_s}


def _disk(folder: Path | None, path: Path, kind: str, nbytes: int, burst: int, measure: bool) -> Measured | None:
    """Of the device under the path, for reads of this kind; None where there is no figure and none can be made.

    burst: pieces that are asked for together, 0: one after the other, as long as there is room.
    """
    depth = DEPTHS[kind]

    def read() -> dict[str, float]:
        files = measurable_files(path, nbytes)
        if burst:
            speed = measure_bursts(files, nbytes, depth, burst, SECONDS)
        else:
            speed = measure_disk(files, SECONDS, kinds=(kind,), depths=(depth,), pieces={kind: nbytes})[0]
        if not speed.bytes_read:
            raise DeviceFailure(f"{path}: nothing was read within {SECONDS:g} s")
        return {kind: speed.bytes_per_s}

    try:
        return _kept_or(folder, f"disk-{device_name(path)}-{kind}-{nbytes}-{depth}-{burst}", measure, read)
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
            record = json.dumps({"what": name, "day": found.day, "rates": found.rates})
            with beside(place.parent, prefix_beside(place)) as (file, written):
                file.write(record.encode())
                file.flush()
                written.replace(place)
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
