"""Checkpoints for tests of binding: the golden's tensors by plain JSON, and one shard of zeros with any tensors."""

from __future__ import annotations

import json
import math
from pathlib import Path

Table = dict[str, tuple[str, list[int]]]  # dtype and shape by name
RELEASED = "language_model.model."
BYTES = {"BF16": 2, "F16": 2, "F32": 4, "U8": 1, "I8": 1, "Q": 1}


def read_table(folder: Path) -> Table:
    """The names, dtypes and shapes in a folder's shards by plain JSON."""
    table = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        for name, entry in json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).items():
            if name != "__metadata__":
                table[name] = (entry["dtype"], entry["shape"])
    return table


def write(folder: Path, table: Table) -> Path:
    """A checkpoint of one shard with these tensors, all zero and sparse."""
    header = {}
    end = 0
    for name, (dtype, shape) in table.items():
        begin, end = end, end + math.prod(shape) * BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "a.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder
