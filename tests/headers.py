"""Shard files with headers for tests, good and bad."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from k3ray.workers.checkpoint.header import ShardHeader, read_header
from k3ray.workers.checkpoint.header_json import HeaderError

BYTES = {"BF16": 2, "F32": 4, "U8": 1}


def write(path: Path, header: object, data_bytes: int, length: int | None = None) -> Path:
    """A shard from a header (JSON text, or an object to write as JSON), zero data, and a stated header length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data_bytes))
    return path


def tensor(begin: int, end: int, shape: list[int] | None = None, dtype: str = "U8") -> dict[str, Any]:
    """One entry of a header."""
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def refusal(path: Path) -> str:
    """What the reader says of a file that it refuses."""
    with pytest.raises(HeaderError) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 1
    return str(caught.value)


def as_plain(header: ShardHeader, text_bytes: int) -> dict[str, tuple[str, list[int], list[int]]]:
    """Name -> dtype, shape, relative offsets, from the columns."""
    plain = {}
    for row, name in enumerate(header.names):
        kind = header.kinds[int(header.kind_ids[row])]
        begin = int(header.begins[row]) - 8 - text_bytes
        plain[name] = (kind.dtype, list(kind.shape), [begin, begin + kind.nbytes])
    return plain
