"""Small checkpoints for the tests of the index, and every tensor of one as plain values."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from k3ray.workers.checkpoint.index import TensorIndex

INDEX = "model.safetensors.index.json"


def write_shard(path: Path, names: list[str]) -> None:
    """A shard of one-byte tensors."""
    header = {n: {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i, n in enumerate(names)}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(len(names)))


def write_index(folder: Path, places: dict[str, str], **metadata: object) -> Path:
    """An index file."""
    path = folder / INDEX
    path.write_text(json.dumps({"metadata": metadata, "weight_map": places}))
    return path


def small_checkpoint(path: Path) -> Path:
    """A checkpoint of two shards and its index file."""
    path.mkdir()
    write_shard(path / "a.safetensors", ["layers.0.w", "layers.1.w", "top"])
    write_shard(path / "b.safetensors", ["layers.2.w", "layers.3.e.7.w"])
    places = dict.fromkeys(("layers.0.w", "layers.1.w", "top"), "a.safetensors")
    write_index(path, places | dict.fromkeys(("layers.2.w", "layers.3.e.7.w"), "b.safetensors"), total_size=5)
    return path


def rows(index: TensorIndex) -> dict[str, tuple[str, str, list[int], int]]:
    """Every tensor of an index as plain values."""
    entries = [index.entry(row) for row in range(len(index))]
    return {e.name: (e.path.name, e.dtype, list(e.shape), e.offset) for e in entries}


def plain_rows(folder: Path) -> dict[str, tuple[str, str, list[int], int]]:
    """The same, read with plain JSON."""
    plain = {}
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":
                plain[name] = (path.name, entry["dtype"], entry["shape"], 8 + length + entry["data_offsets"][0])
    return plain


def plain_rows_of(folder: Path, names: list[str]) -> dict[str, Any]:
    """The same of some of its files alone."""
    target = folder.parent / "plain"
    target.mkdir()
    for name in names:
        shutil.copy(folder / name, target)
    return plain_rows(target)
