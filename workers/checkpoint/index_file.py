"""The checkpoint's own index, model.safetensors.index.json or its .gz: which shard holds which tensor, as it states.

Reads it strictly; index_build closes it against the headers.
"""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from k3ray.workers.checkpoint.header_json import count_quotes
from k3ray.workers.failure import Failure

NAMES = ("model.safetensors.index.json", "model.safetensors.index.json.gz")
MAX_BYTES = 1 << 30  # unpacked; the released one has 51 MB
_ADVICE = "Fetch the index again, or remove it: without one every *.safetensors file of the folder is read."


class IndexFileError(Failure):
    """The checkpoint's index file cannot be used or says something else than the shards."""

    def __init__(self, path: Path, found: str, expected: str) -> None:
        self.path = path
        super().__init__(f"{path}: found {found}, expected {expected}. {_ADVICE}")


@dataclass(frozen=True, slots=True)
class IndexFile:
    """The shard's name of each tensor's name, as the file states it. stated_bytes: its total_size.

    Its strings live only while an index is made.
    """

    path: Path
    places: dict[str, str]
    shard_names: tuple[str, ...]
    stated_bytes: int | None


class _Document(msgspec.Struct):
    weight_map: msgspec.Raw
    metadata: dict[str, Any] | None = None


_MAP = msgspec.json.Decoder(dict[str, str])


def find_index_file(directory: Path) -> Path | None:
    """The index file of a checkpoint, None when it has none; raises IndexFileError when there are two."""
    found = [directory / name for name in NAMES if (directory / name).exists()]
    if len(found) == 2 and _read_bytes(found[0]) != _read_bytes(found[1]):
        raise IndexFileError(found[0], f"another content than in {found[1].name} beside it", "one index")
    return found[0] if found else None


def read_index_file(path: Path) -> IndexFile:
    """Read the index; raises IndexFileError."""
    data = _read_bytes(path)
    try:
        document = msgspec.json.decode(data, type=_Document)
        places = _decode_map(bytes(document.weight_map), path)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        expected = "a JSON object whose weight_map gives each tensor's shard"
        raise IndexFileError(path, f"a content that cannot be read ({error})", expected) from error
    shard_names = tuple(sorted(set(places.values())))
    for name in shard_names:
        if Path(name).name != name or not name.endswith(".safetensors") or name.startswith("."):
            raise IndexFileError(
                path, f"the shard name {json.dumps(name)}", "the name of a .safetensors file beside it"
            )
    stated = (document.metadata or {}).get("total_size")
    return IndexFile(path, places, shard_names, stated if type(stated) is int else None)


def _decode_map(raw: bytes, path: Path) -> dict[str, str]:
    """The weight map; a name that occurs twice is refused (without a backslash, each entry has four quotes)."""
    mapping = _MAP.decode(raw)
    if b"\\" not in raw and count_quotes(raw) == 4 * len(mapping):
        return mapping

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) != len(items):
            seen: set[str] = set()
            repeated = next(key for key, _ in items if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise IndexFileError(path, f"the tensor {json.dumps(repeated)} more than once", "each tensor once")
        return result

    strict: dict[str, str] = json.loads(raw, object_pairs_hook=pairs)
    return strict


def _read_bytes(path: Path) -> bytes:
    """The unpacked content, bounded."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise IndexFileError(path, f"a file that cannot be read ({error})", "the checkpoint's index") from error
    if len(data) > MAX_BYTES:
        raise IndexFileError(path, f"more than {MAX_BYTES} bytes", "an index of at most that size")
    return bytes(data)
