"""Finds tensors in a folder of safetensors files and reads one at a time, as it is stored.

The layout: 8 bytes of header length (little-endian), a JSON header, the tensors' bytes; offsets count from the
header's end. Damage is not looked for here beyond what would read the wrong bytes.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch

STORED = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}
PREFIXES = ("language_model.model.", "model.")


class ReferenceReadError(Exception):
    """A tensor that is absent or not as a safetensors file has it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor's bytes begin in which file."""

    path: Path
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class TensorFolder:
    """All tensors of the folder's *.safetensors files by name; nothing is kept open and nothing is kept in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places: dict[str, Place] = {}
        for path in sorted(folder.glob("*.safetensors")):
            self._places |= _header(path)
        head = "embed_tokens.weight"
        prefixes = [prefix for prefix in PREFIXES if prefix + head in self._places]
        if len(prefixes) != 1:
            raise ReferenceReadError(f"{folder}: {head} stands under {len(prefixes)} of {PREFIXES}, expected one")
        self._prefix = prefixes[0]

    def top(self, name: str) -> torch.Tensor:
        """Return a tensor outside the layers; lm_head stands beside the model, not in it."""
        prefix = self._prefix.removesuffix("model.") if name.startswith("lm_head") else self._prefix
        return self._read(prefix + name)

    def rows(self, name: str, ids: list[int]) -> torch.Tensor:
        """Return rows of a matrix outside the layers, (ids, columns), read one by one."""
        place = self._place(self._prefix + name)
        width = place.nbytes // place.shape[0]
        return torch.stack([_bytes(place, row * width, width).view(place.dtype) for row in ids])

    def layer(self, layer: int, name: str) -> torch.Tensor:
        """Return a tensor of a layer (zero-based) by its name below `layers.N.`."""
        return self._read(f"{self._prefix}layers.{layer}.{name}")

    def _read(self, name: str) -> torch.Tensor:
        place = self._place(name)
        return _bytes(place, 0, place.nbytes).view(place.dtype).reshape(place.shape)

    def _place(self, name: str) -> Place:
        if name not in self._places:
            raise ReferenceReadError(f"{self.folder}: no tensor {name}")
        return self._places[name]


def _header(path: Path) -> dict[str, Place]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    places = {}
    for name, entry in entries.items():
        dtype = STORED.get(entry["dtype"])
        if dtype is None:
            continue  # no tensor of the text model is stored so: asking for it by name is an error
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ReferenceReadError(f"{path}: {name}: {end - begin} bytes for {entry['dtype']} {list(shape)}")
        places[name] = Place(path, 8 + length + begin, end - begin, dtype, shape)
    return places


def _bytes(place: Place, skip: int, count: int) -> torch.Tensor:
    memory = torch.empty(count, dtype=torch.uint8)
    with place.path.open("rb") as file:
        file.seek(place.offset + skip)
        if count and file.readinto(memory.numpy()) != count:
            raise ReferenceReadError(f"{place.path}: the file ends within {count} bytes from {place.offset + skip}")
    return memory
