"""Copies of a checkpoint cut into one shard a layer, so that folders can hold parts of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from k3ray.workers.checkpoint.index import open_index
from k3ray.workers.checkpoint.shapes import RELEASED_PREFIX
from k3ray.workers.checkpoint.tensors import TensorReader

SMALL_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tiktoken.model")
TOP = "top"
DTYPES = {"uint16": "BF16", "float32": "F32", "uint8": "U8"}


def shard_name(part: int | str) -> str:
    """The file of a layer, or of what is outside the layers."""
    return f"model-{part:05}.safetensors" if isinstance(part, int) else f"model-{part}.safetensors"


def cut_by_layers(model: Path, out: Path) -> Path:
    """Write the checkpoint with one shard a layer and one for the rest, and its index file."""
    out.mkdir()
    places: dict[str, str] = {}
    index = open_index(model, [])
    with TensorReader(index) as reader:
        parts: dict[int | str, dict[str, np.ndarray]] = {}
        for row in range(len(index)):
            name = index.name(row)
            below = name.removeprefix(f"{RELEASED_PREFIX}layers.")
            part: int | str = TOP if below == name else int(below.partition(".")[0])
            parts.setdefault(part, {})[name] = reader.read(name)
    for part, tensors in parts.items():
        write_shard(out / shard_name(part), tensors)
        places |= dict.fromkeys(tensors, shard_name(part))
    document = {"metadata": {"total_size": 0}, "weight_map": dict(sorted(places.items()))}
    (out / "model.safetensors.index.json").write_text(json.dumps(document))
    for name in SMALL_FILES:
        if (model / name).is_file():
            shutil.copy(model / name, out / name)
    return out


def write_shard(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """A safetensors file with the tensors one after the other."""
    header, end = {}, 0
    for name, values in tensors.items():
        offsets = [end, end := end + values.nbytes]
        header[name] = {"dtype": DTYPES[values.dtype.name], "shape": list(values.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(values.tobytes() for values in tensors.values()))


def part_of(whole: Path, out: Path, parts: Iterable[int | str]) -> Path:
    """A folder with only these shards of a checkpoint that is cut by layers, beside its config and index file."""
    out.mkdir()
    for name in (*SMALL_FILES, "model.safetensors.index.json", *map(shard_name, parts)):
        if (whole / name).is_file():
            shutil.copy(whole / name, out / name)
    return out
