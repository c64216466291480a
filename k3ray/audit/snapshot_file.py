"""A snapshot as JSON, written whole and read back strictly: no field missing, unknown, ill-typed or at odds.

Knows nothing of how a statement was made.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from k3ray.audit.snapshot import Snapshot, SourceFile
from k3ray.workers.failure import Failure

_SHA256 = re.compile(r"[0-9a-f]{64}")


class SnapshotError(Failure):
    """A file that is no audit snapshot of this format."""

    exit_code = 2


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """The snapshot as indented JSON with a line's end; ValueError for a number that JSON has no way to write."""
    _check_finite(msgspec.to_builtins(snapshot), "snapshot")
    return msgspec.json.format(msgspec.json.encode(snapshot), indent=1) + b"\n"


def decode_snapshot(data: bytes, name: str) -> Snapshot:
    """Read a snapshot back; SnapshotError, naming the field, when it is none: a field missing, unknown or ill-typed."""
    try:
        raw = _decoded(data)
        snapshot = msgspec.convert(raw, Snapshot, strict=True)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise SnapshotError(f"{name}: found no audit snapshot ({error}); make it again with k3ray audit") from error
    if (place := _difference(raw, msgspec.to_builtins(snapshot), "$")) is not None:
        raise SnapshotError(f"{name}: found a missing or unknown field at {place}; make it again with k3ray audit")
    if (problem := next(_problems(raw, snapshot), None)) is not None:
        raise SnapshotError(f"{name}: found {problem}; make it again with k3ray audit")
    return snapshot


def read_snapshot(path: Path) -> Snapshot:
    """The snapshot in a file; SnapshotError when it cannot be read."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SnapshotError(f"{path}: cannot be read ({error.strerror}); name what k3ray audit --out wrote") from error
    return decode_snapshot(data, str(path))


def _decoded(data: bytes) -> Any:
    """The JSON value; ValueError for a key that stands twice in an object, of which a reader would see one only."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key stands twice in one object")
        return found

    msgspec.json.decode(data)  # the grammar, more strictly than the standard library reads it
    return json.loads(data, object_pairs_hook=once)


def _difference(raw: Any, read: Any, place: str) -> str | None:
    """Where two JSON values differ in their keys, None where they do not; the values themselves were converted."""
    if isinstance(raw, dict) and isinstance(read, dict):
        for key in raw.keys() ^ read.keys():
            return f"{place}.{key}"
        pairs = [(raw[key], read[key], f"{place}.{key}") for key in raw]
    elif isinstance(raw, list) and isinstance(read, (list, tuple)):
        pairs = [(one, other, f"{place}[{number}]") for number, (one, other) in enumerate(zip(raw, read, strict=True))]
    else:
        return None
    return next((found for pair in pairs if (found := _difference(*pair)) is not None), None)


def _problems(raw: Any, snapshot: Snapshot) -> Iterator[str]:
    """What the types allow and no audit writes."""
    if (place := _negative_count(raw, "$")) is not None:
        yield f"a negative count at {place}"
    try:
        datetime.strptime(snapshot.made_at, "%Y-%m-%dT%H:%M:%SZ")
    except ValueError:
        yield f"made_at {snapshot.made_at!r}, expected a time like 2026-11-30T16:40:00Z"
    ids = [statement.id for statement in snapshot.statements]
    yield from (f"two statements {id!r}" for number, id in enumerate(ids) if id in ids[:number])
    source = snapshot.source
    yield from (f"{what} of file {file.name!r}" for file in source.files if (what := _odd_file(file)))
    fetched = sum(file.fetched_bytes for file in source.files)
    if fetched != source.fetched_bytes:
        yield f"{source.fetched_bytes} bytes fetched, and {fetched} by its files"
    for row in snapshot.statistics:
        known = [value for value in (row.minimum, row.p10, row.median, row.p90, row.maximum) if value is not None]
        if known != sorted(known):
            yield f"statistics of {row.subject!r} that do not ascend from minimum to maximum"


def _negative_count(raw: Any, place: str) -> str | None:
    """Where a whole number is negative: all of a snapshot's are counts, except in its statistics."""
    if type(raw) is int and raw < 0:
        return place
    items: list[tuple[object, Any]] = []
    if isinstance(raw, dict):
        items = [(f".{key}", item) for key, item in raw.items() if key != "statistics"]
    elif isinstance(raw, list):
        items = [(f"[{number}]", item) for number, item in enumerate(raw)]
    return next((found for key, item in items if (found := _negative_count(item, f"{place}{key}"))), None)


def _odd_file(file: SourceFile) -> str:
    """What of a file's record is at odds with the rest of it, "" when nothing is."""
    if bool(file.sha256) != bool(file.sha256_of) or (file.sha256 and not _SHA256.fullmatch(file.sha256)):
        return f"sha256 {file.sha256[:80]!r} ({file.sha256_of or 'of nothing'})"
    edges = [edge for place in file.places for edge in place]
    if edges != sorted(set(edges)) or (file.bytes is not None and edges and edges[-1] > file.bytes):
        return "places that do not ascend within the file"
    if bool(edges) != (file.sha256_of == "fetched ranges"):
        return f"{len(file.places)} places ({file.sha256_of or 'nothing'} hashed)"
    if sum(end - begin for begin, end in file.places) > file.fetched_bytes:
        return f"fewer bytes fetched ({file.fetched_bytes}) than its places hold"
    return ""


def _check_finite(value: Any, place: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{place}: {value} cannot be written as JSON")
    if isinstance(value, dict):
        for key, item in value.items():
            _check_finite(item, f"{place}.{key}")
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            _check_finite(item, f"{place}[{number}]")
