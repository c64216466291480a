"""Writing safetensors shards: which tensor goes to which shard, the header, and the bytes, streamed block by block.

A shard is an 8-byte little-endian header length, a JSON header padded with spaces to a multiple of 8, and the tensors'
bytes without gaps. Knows nothing of models.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

ITEM_BYTES = {"F32": 4, "BF16": 2, "U8": 1}


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor that will be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its data."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


def in_file_order(tensors: Iterable[PlannedTensor]) -> list[PlannedTensor]:
    """The order of tensors in a shard: wide elements first, so that all are aligned, then by name."""
    return sorted(tensors, key=lambda tensor: (-ITEM_BYTES[tensor.dtype], tensor.name))


def encode_header(tensors: Sequence[PlannedTensor]) -> bytes:
    """The length and the header of a shard that holds these tensors in this order."""
    header: dict[str, object] = {}  # the release has no __metadata__
    offset = 0
    for tensor in tensors:
        end = offset + tensor.num_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_shard(
    path: Path,
    tensors: Sequence[PlannedTensor],
    blocks: Callable[[PlannedTensor], Iterator[npt.NDArray[np.generic]]],
    wrote: Callable[[int], None],
) -> None:
    """Write one shard; `blocks` gives a tensor's data in order, `wrote` is told the bytes of every block written."""
    with path.open("xb") as file:
        file.write(encode_header(tensors))
        for tensor in tensors:
            written = 0
            for block in blocks(tensor):
                file.write(block.data)
                written += block.nbytes
                wrote(block.nbytes)
            assert written == tensor.num_bytes, f"{tensor.name}: {written} bytes made, {tensor.num_bytes} planned"


def cut_by_bytes(tensors: Sequence[PlannedTensor], num_parts: int) -> list[list[PlannedTensor]]:
    """Cut a sequence of tensors into consecutive parts of about equal bytes; parts that would be empty are left out."""
    total = sum(tensor.num_bytes for tensor in tensors)
    parts: list[list[PlannedTensor]] = [[] for _ in range(num_parts)]
    before = 0
    for tensor in tensors:
        parts[min(before * num_parts // max(total, 1), num_parts - 1)].append(tensor)
        before += tensor.num_bytes
    return [part for part in parts if part]


def shard_name(number: int, count: int) -> str:
    """The released naming: a five-digit one-based number of a six-digit count."""
    return f"model-{number:05d}-of-{count:06d}.safetensors"


def encode_index(shards: Sequence[tuple[str, Sequence[PlannedTensor]]]) -> str:
    """The text of model.safetensors.index.json for shards given with their file names."""
    weight_map = {tensor.name: name for name, tensors in shards for tensor in tensors}
    total = sum(tensor.num_bytes for _, tensors in shards for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=1) + "\n"
