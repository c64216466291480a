"""Safetensors headers: the goldens' agree with plain JSON; every contradiction is refused with its numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3ray.workers.checkpoint import header as header_module
from k3ray.workers.checkpoint.header import read_header
from k3ray.workers.checkpoint.header_json import decode_entries
from tests.headers import as_plain, refusal, tensor, write

TOP = 2**63 - 1


def test_golden_headers_agree_with_plain_json(k3b_dir: Path) -> None:
    shards = sorted(k3b_dir.glob("*.safetensors"))
    assert len(shards) == 5
    for path in shards:
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        document = json.loads(data[8 : 8 + length])
        document.pop("__metadata__")
        expected = {name: (e["dtype"], e["shape"], e["data_offsets"]) for name, e in document.items()}
        header = read_header(path)
        assert as_plain(header, length) == expected
        assert header.file_bytes == len(data)


@pytest.mark.parametrize(
    "header",
    [
        {"a": tensor(0, 4), "b": tensor(4, 6)},
        {"__metadata__": {}, "a": tensor(0, 4), "b": tensor(4, 6)},
        {"__metadata__": {"format": "pt", "x": "y"}, "a": tensor(0, 4), "b": tensor(4, 6)},
        {"a": tensor(0, 4), "__metadata__": {"format": "pt"}, "b": tensor(4, 6)},
        {"a": tensor(0, 4), "b": tensor(4, 6), "__metadata__": {"dtype": '"dtype" } { \\ \''}},
        {"b": tensor(4, 6), "a": tensor(0, 4)},
        {"a": tensor(0, 4), "b": tensor(4, 6), "empty": tensor(4, 4, [3, 0])},
        {"a": tensor(0, 4, [], "F32"), "b": tensor(4, 6, [1], "BF16")},
        {"a": tensor(0, 4, [2, 2]), "b": tensor(4, 6, [4], "F4")},
        {"a": tensor(0, 4, [7, 9], "Q4_K"), "b": tensor(4, 6)},  # an unknown dtype has no size to check
        {"data_offsets": tensor(0, 4), "shape": tensor(4, 6)},
        {'quoted "name" \\ here': tensor(0, 4), "ä": tensor(4, 6)},
    ],
)
def test_good_headers(tmp_path: Path, header: dict[str, Any]) -> None:
    path = write(tmp_path / "a.safetensors", header, 6)
    found = read_header(path)
    expected = {n: (e["dtype"], e["shape"], e["data_offsets"]) for n, e in header.items() if n != "__metadata__"}
    assert as_plain(found, len(json.dumps(header))) == expected


def test_trailing_spaces_and_a_shard_without_tensors(tmp_path: Path) -> None:
    assert read_header(write(tmp_path / "a.safetensors", b"{}      ", 0)).names == []
    text = json.dumps({"a": tensor(0, 3)}).encode() + b" " * 5
    header = read_header(write(tmp_path / "b.safetensors", text, 3))
    assert header.names == ["a"]
    assert header.begins.tolist() == [8 + len(text)]


@pytest.mark.parametrize(
    ("length", "words"),
    [
        (0, "found a header that begins with b''"),
        (2**63, f"a header length of {2**63}, expected at most 100000000"),
        (2**64 - 1, f"a header length of {2**64 - 1}"),
        (100_000_001, "a header length of 100000001, expected at most 100000000"),
        (2, "not JSON"),
    ],
)
def test_header_lengths(tmp_path: Path, length: int, words: str) -> None:
    assert words in refusal(write(tmp_path / "a.safetensors", {"a": tensor(0, 6)}, 6, length))


def test_a_header_that_ends_one_byte_past_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", {"a": tensor(0, 6)}, 6)
    size = path.stat().st_size
    write(path, {"a": tensor(0, 6)}, 6, size - 7)
    assert f"a header length of {size - 7} in a file of {size} bytes, expected at most {size - 8}" in refusal(path)


@pytest.mark.parametrize("size", range(8))
def test_files_shorter_than_the_length_field(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(bytes(size))
    assert f"found a file of {size} bytes" in refusal(path)


def test_a_file_that_is_not_there_or_a_folder(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(tmp_path / "none.safetensors")
    assert "cannot be read" in refusal(tmp_path)


@pytest.mark.parametrize("repeat", ["{}", '{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'])
def test_a_repeated_name_is_said(tmp_path: Path, repeat: str) -> None:
    entry = json.dumps(tensor(0, 4))
    text = f'{{"first":{entry},"twice":{repeat},"twice":{entry}}}'.encode()
    message = refusal(write(tmp_path / "a.safetensors", text, 4))
    assert 'tensor "twice": found the name more than once' in message


@pytest.mark.parametrize(
    "text",
    [
        '{"a":%s,"\\u0061":%s}',  # the same name written in two ways
        '{"__metadata__":{"a":"b"},"a":%s,"a":%s}',
        '{"a":%s,"a":%s,"__metadata__":{}}',
    ],
)
def test_a_repeated_name_in_disguise(tmp_path: Path, text: str) -> None:
    entry = json.dumps(tensor(0, 4))
    path = write(tmp_path / "a.safetensors", (text % (entry, entry)).encode(), 4)
    assert 'tensor "a": found the name more than once' in refusal(path)


@pytest.mark.parametrize("field", ["dtype", "shape", "data_offsets"])
def test_a_repeated_field_is_said(tmp_path: Path, field: str) -> None:
    entry = json.dumps(tensor(0, 4))
    extra = json.dumps(tensor(0, 4)[field])
    text = f'{{"a":{{"{field}":{extra},{entry[1:]}}}'.encode()
    message = refusal(write(tmp_path / "a.safetensors", text, 4))
    assert f'tensor "a": found its field "{field}" more than once' in message


def test_repeated_metadata_is_said(tmp_path: Path) -> None:
    entry = json.dumps(tensor(0, 4))
    for text in ('{"__metadata__":{},"__metadata__":{},"a":%s}', '{"__metadata__":{"k":"v","k":"w"},"a":%s}'):
        assert "more than once" in refusal(write(tmp_path / "a.safetensors", (text % entry).encode(), 4))


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"a": tensor(0, 4), "b": tensor(5, 6)}, "a gap of 1 bytes: it begins at 5, expected it to begin at 4"),
        ({"a": tensor(1, 6)}, "a gap of 1 bytes: it begins at 1, expected it to begin at 0, the data's start"),
        ({"a": tensor(0, 4), "b": tensor(3, 6)}, 'an overlap of 1 bytes: it begins at 3, expected it to begin at 4'),
        ({"a": tensor(0, 6), "b": tensor(0, 6)}, "an overlap of 6 bytes"),
        ({"a": tensor(0, 6), "b": tensor(2, 2)}, "an overlap of 4 bytes"),
        ({"a": tensor(0, 7)}, "tensors that end at 7 and 6 bytes after the header (the file is cut)"),
        ({"a": tensor(0, 5)}, "tensors that end at 5 and 6 bytes after the header (the file has bytes that no tensor"),
        ({}, "tensors that end at 0 and 6 bytes"),
        ({"a": tensor(6, 0, [6])}, "data_offsets [6, 0], expected an end that is not before the begin"),
        ({"a": tensor(0, 6, [5])}, "a span of 6 bytes, expected 5 bytes for shape [5] of U8"),
        ({"a": tensor(0, 6, [3], "F32")}, "a span of 6 bytes, expected 12 bytes for shape [3] of F32"),
        ({"a": tensor(0, 6, [2, 3, 2])}, "expected 12 bytes"),
        ({"a": tensor(0, 6, [])}, "expected 1 bytes for shape []"),
        ({"a": tensor(0, 6, [3], "F4")}, "shape [3] of F4, 12 bits, expected a whole number of bytes"),
        ({"a": tensor(0, 6, [2**32, 2**32, 2])}, "more than 2^63 bytes"),
        ({"a": tensor(0, 6, [2**61, 2], "F32")}, "more than 2^63 bytes"),
        ({"a": tensor(0, 6, [TOP, TOP, TOP])}, "more than 2^63 bytes"),
        ({"a": tensor(0, 6, [1] * 65)}, "65 dimensions, expected at most 64"),
        ({"a": tensor(TOP - 6, TOP, [6])}, f"it begins at {TOP - 6}, expected it to begin at 0"),
        ({"a": tensor(0, TOP, [TOP])}, f"tensors that end at {TOP} and 6 bytes"),
        ({"a": tensor(-1, 5, [6])}, "data_offsets [-1, 5]"),
        ({"a": tensor(0, 2**63, [6])}, f"data_offsets [0, {2**63}]"),
        ({"a": tensor(0, 10**300, [6])}, "data_offsets [0, 1000"),
        ({"a": tensor(0, 6, [-6])}, "shape [-6]"),
        ({"a": {"dtype": "U8", "shape": [6], "data_offsets": [0, 6.0]}}, "data_offsets [0, 6.0]"),
        ({"a": {"dtype": "U8", "shape": [6], "data_offsets": [False, 6]}}, "data_offsets [false, 6]"),
        ({"a": {"dtype": "U8", "shape": [6], "data_offsets": [0, "6"]}}, 'data_offsets [0, "6"]'),
        ({"a": {"dtype": "U8", "shape": [6], "data_offsets": [0]}}, "data_offsets [0]"),
        ({"a": {"dtype": "U8", "shape": [6], "data_offsets": [0, 3, 6]}}, "data_offsets [0, 3, 6]"),
        ({"a": {"dtype": "U8", "shape": [6], "data_offsets": None}}, "data_offsets null"),
        ({"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 6]}}, "shape [true]"),
        ({"a": {"dtype": "U8", "shape": 6, "data_offsets": [0, 6]}}, "shape 6"),
        ({"a": {"dtype": 8, "shape": [6], "data_offsets": [0, 6]}}, "dtype 8"),
        ({"a": {"dtype": "U8", "shape": [6]}}, "the fields [\"dtype\", \"shape\"]"),
        ({"a": tensor(0, 6) | {"x": 1}}, "expected exactly dtype, shape and data_offsets"),
        ({"a": None}, "found null, expected an object"),
        ({"a": [1]}, "found [1], expected an object"),
        ({"__metadata__": {"a": 1}, "b": tensor(0, 6)}, 'tensor "__metadata__": found {"a": 1}, expected an object of'),
        ({"__metadata__": None, "b": tensor(0, 6)}, "found null, expected an object of strings"),
        ({"__metadata__": tensor(0, 6)}, "expected an object of strings"),
        ({"b": tensor(0, 6), "__metadata__": tensor(6, 6)}, "expected an object of strings"),
        ({"\ud800": tensor(0, 6)}, "a lone surrogate"),
        ([tensor(0, 6)], "a header that begins with b'['"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_with_their_numbers(tmp_path: Path, header: object, words: str) -> None:
    message = refusal(write(tmp_path / "a.safetensors", header, 6))
    assert words in message
    if isinstance(header, dict) and len(header) == 1 and "a" in header:
        assert 'tensor "a": ' in message


@pytest.mark.parametrize(
    "text",
    [
        b"{", b"{}}", b'{"a":}', b"{'a':1}", b"\xff{}", b'{"a\xff":1}', b"{}\0", b'{"__metadata__":{},}', b'{"a":NaN}',
        b'{"__metadata__":{}"a":1}', b'{"a":' * 200_000, b'{"a":' + b"[" * 200_000, b'{"a":' + b"9" * 5000 + b"}",
        b'{"a":{"dtype":' + b"[" * 600 + b"]" * 600 + b',"shape":[],"data_offsets":[0,1]}}', b"\xef\xbb\xbf{}",
    ],
)  # fmt: skip
def test_text_that_is_no_header(tmp_path: Path, text: bytes) -> None:
    refusal(write(tmp_path / "a.safetensors", text, 0))


@pytest.mark.parametrize("change", [-1, 1])
def test_a_golden_shard_one_byte_off(tmp_path: Path, k3b_dir: Path, change: int) -> None:
    data = (k3b_dir / "model-00001-of-000005.safetensors").read_bytes()
    path = tmp_path / "a.safetensors"
    path.write_bytes(data[:change] if change < 0 else data + b"\0")
    message = refusal(path)
    end = re.search(r"tensors that end at (\d+) and (\d+) bytes", message)
    assert end is not None
    assert int(end[2]) - int(end[1]) == change


def test_a_short_read_is_read_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.safetensors", {"a": tensor(0, 6)}, 6)
    whole = header_module.os.pread
    monkeypatch.setattr(header_module.os, "pread", lambda fd, count, offset: whole(fd, min(count, 3), offset))
    assert read_header(path).names == ["a"]


def test_the_fast_way_and_the_strict_way_agree(k3b_dir: Path) -> None:
    data = (k3b_dir / "model-00002-of-000005.safetensors").read_bytes()
    text = data[8 : 8 + int.from_bytes(data[:8], "little")]
    names, entries = decode_entries(text, Path("a"))
    last = text.rstrip()[:-1]
    strict = last + b',"quo\\"te":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    assert decode_entries(strict, Path("a"))[0] == [*names, 'quo"te']
    assert decode_entries(strict, Path("a"))[1][:-1] == entries


def test_columns_have_no_object_per_tensor(tmp_path: Path) -> None:
    table = {f"layers.{n}.weight": tensor(4 * n, 4 * n + 4) for n in range(1000)}
    header = read_header(write(tmp_path / "a.safetensors", table, 4000))
    assert len(header.kinds) == 1
    assert header.kind_ids.dtype == np.uint32
    assert header.begins.dtype == np.int64
