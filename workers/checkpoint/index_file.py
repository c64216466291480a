"""The checkpoint's own index, model.safetensors.index.json or its .gz: which shard holds which tensor, as it states.

Reads it strictly; index_build closes it against the headers.
"""

from __future__ import annotations

import gzip
import json
import zlib
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from k3ray.workers.failure import Failure

NAMES = ("model.safetensors.index.json", "model.safetensors.index.json.gz")
MAX_BYTES = 1 << 30  # unpacked; the released one has 51 MB
_BLOCK = 1 << 22  # bytes looked at in one piece, which bounds the temporaries
_ADVICE = "Fetch the index again, or remove it: without one every *.safetensors file of the folder is read."


class IndexFileError(Failure):
    """The checkpoint's index file cannot be used or says something else than the shards."""

    def __init__(self, path: Path, found: str, expected: str) -> None:
        self.path = path
        super().__init__(f"{path}: found {found}, expected {expected}. {_ADVICE}")


@dataclass(frozen=True, slots=True)
class IndexFile:
    """What the file states, as columns: the tensors' names, a shard after the other, the shards in ascending order.

    names: (tensors,) large_string; starts: (shards + 1,) where each shard's begin. stated_bytes: its total_size. They
    live only while an index is made.
    """

    path: Path
    shard_names: tuple[str, ...]
    names: pa.Array
    starts: tuple[int, ...]
    stated_bytes: int | None

    def names_in(self, shard: str) -> pa.Array:
        """The tensors that the file places in a shard."""
        number = bisect_left(self.shard_names, shard)
        if self.shard_names[number : number + 1] != (shard,):
            return self.names.slice(0, 0)
        return self.names.slice(self.starts[number], self.starts[number + 1] - self.starts[number])


class _Document(msgspec.Struct):
    weight_map: msgspec.Raw
    metadata: dict[str, Any] | None = None


def find_index_file(directory: Path) -> Path | None:
    """The index file of a checkpoint, None when it has none; raises IndexFileError when there are two."""
    found = [directory / name for name in NAMES if _is_there(directory / name)]
    if len(found) == 2 and _read_bytes(found[0]) != _read_bytes(found[1]):
        raise IndexFileError(found[0], f"another content than in {found[1].name} beside it", "one index")
    return found[0] if found else None


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:  # a folder that may be listed and not entered
        raise IndexFileError(path, f"a file that cannot be read ({error})", "the checkpoint's index") from error


def read_index_file(path: Path) -> IndexFile:
    """Read the index; raises IndexFileError."""
    try:
        data = _read_bytes(path)
        document = msgspec.json.decode(data, type=_Document)
        split = None if b"\\" in data else _split_map(memoryview(document.weight_map))
        names, shards = split or _decode_map(bytes(document.weight_map), path)
        encoded = shards.dictionary_encode()
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        expected = "a JSON object whose weight_map gives each tensor's shard"
        raise IndexFileError(path, f"a content that cannot be read ({error})", expected) from error
    stated = (document.metadata or {}).get("total_size")
    del data, document, split
    shard_names = encoded.dictionary.to_pylist()
    for name in shard_names:
        plain = Path(name).name == name and name.isprintable() and not name.startswith(".")
        if not plain or not name.endswith(".safetensors"):
            raise IndexFileError(
                path, f"the shard name {json.dumps(name)}", "the name of a .safetensors file beside it"
            )
    order = sorted(range(len(shard_names)), key=shard_names.__getitem__)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    shard_ids = rank[encoded.indices.to_numpy()]
    return IndexFile(
        path,
        tuple(shard_names[number] for number in order),
        names.take(pa.array(np.argsort(shard_ids, kind="stable"))),
        (0, *np.cumsum(np.bincount(shard_ids, minlength=len(order))).tolist()),
        stated if type(stated) is int else None,
    )


def _split_map(raw: memoryview) -> tuple[pa.Array, pa.Array] | None:
    """Names and shards of a JSON object of strings without a backslash, cut at its quotes; None for any other text.

    The pieces between quotes are name, colon, shard, comma, and so on: that the colons and commas are nothing else is
    checked on their distinct texts. A piece that is no UTF-8 is a ValueError.
    """
    text = np.frombuffer(raw, dtype=np.uint8)
    blocks = range(0, len(text), _BLOCK)
    quotes = np.concatenate([np.flatnonzero(text[low : low + _BLOCK] == ord('"')) + low for low in blocks])
    if len(quotes) == 0 or len(quotes) % 4:
        return None
    bounds = np.append(quotes, len(text))
    bounds[:-1:2] += 1  # an opening quote belongs to what is before it, a closing one to what comes after
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(raw)]
    pieces = pa.Array.from_buffers(pa.large_binary(), len(quotes), buffers)

    def distinct(first: int, stop: int) -> set[bytes]:
        between = pieces.take(pa.array(np.arange(first, stop, 4))).dictionary_encode().dictionary.to_pylist()
        return {piece.translate(None, b" \t\r\n") for piece in between}

    opening = raw[: int(bounds[0])].tobytes().translate(None, b" \t\r\n")
    last = len(quotes) - 1
    if opening != b'{"' or distinct(1, last) != {b'":"'} or distinct(last, last + 1) != {b'"}'}:
        return None
    if last > 3 and distinct(3, last) != {b'","'}:
        return None
    names, shards = (pieces.take(pa.array(np.arange(first, last, 4))).cast(pa.large_string()) for first in (0, 2))
    return names, shards


def _decode_map(raw: bytes, path: Path) -> tuple[pa.Array, pa.Array]:
    """Names and shards of any weight map, with plain JSON."""

    def pairs(items: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        return items

    items = json.loads(raw, object_pairs_hook=pairs) if raw.startswith(b"{") else None
    if not isinstance(items, list) or not all(isinstance(item, tuple) and isinstance(item[1], str) for item in items):
        raise IndexFileError(path, "a weight_map with something else than strings", "a shard's name for each tensor")
    names, shards = (pa.array([item[place] for item in items], type=pa.large_string()) for place in (0, 1))
    return names, shards


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
