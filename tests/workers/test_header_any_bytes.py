"""Headers of any writing, changed and made up: read exactly as an independent reading does, or refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3ray.workers.checkpoint import header as header_module
from k3ray.workers.checkpoint.header import read_header
from k3ray.workers.checkpoint.header_json import HeaderError
from tests.headers import BYTES, as_plain, tensor, write

NAMES = st.text(max_size=12) | st.sampled_from(["__metadata__", "dtype", "shape", "data_offsets", "a.1.b"])


@st.composite
def headers(draw: st.DrawFn) -> tuple[bytes, int]:
    """A correct header's JSON, in any writing and order, and the bytes of its data."""
    entries = {}
    end = 0
    for name in draw(st.lists(NAMES.filter(lambda name: name != "__metadata__"), unique=True, max_size=5)):
        dtype = draw(st.sampled_from(sorted(BYTES)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        begin, end = end, end + math.prod(shape) * BYTES[dtype]
        entries[name] = tensor(begin, end, shape, dtype)
    items: list[tuple[str, object]] = draw(st.permutations(list(entries.items())))
    if draw(st.booleans()):
        metadata = draw(st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3))
        items.insert(draw(st.integers(0, len(items))), ("__metadata__", metadata))
    text = json.dumps(dict(items), ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1])))
    return text.encode(), end


@settings(max_examples=150, deadline=None)
@given(case=headers())
def test_any_correct_header_is_read(case: tuple[bytes, int], tmp_path_factory: pytest.TempPathFactory) -> None:
    text, data_bytes = case
    header = read_header(write(tmp_path_factory.mktemp("h") / "a.safetensors", text, data_bytes))
    document = json.loads(text)
    document.pop("__metadata__", None)
    expected = {name: (e["dtype"], e["shape"], e["data_offsets"]) for name, e in document.items()}
    assert as_plain(header, len(text)) == expected
    assert header.names == list(document)


def strict_reading(text: bytes, data_bytes: int) -> dict[str, Any] | None:
    """An independent reading of a header: its entries, or None when anything is wrong."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(items)) != len(items):
            raise ValueError
        return dict(items)

    try:
        document = json.loads(text.decode(), object_pairs_hook=pairs)
        if not text.startswith(b"{"):
            return None
        metadata = document.pop("__metadata__", {})
        if not all(type(item) is str for item in metadata.values()):
            return None
        spans = []
        for name, entry in document.items():
            name.encode()
            (begin, end), shape, dtype = entry["data_offsets"], entry["shape"], entry["dtype"]
            if set(entry) != {"dtype", "shape", "data_offsets"} or not dtype.isascii():
                return None
            if any(type(item) is not int or item < 0 for item in (*shape, begin, end)) or end < begin:
                return None
            bits = header_module.DTYPE_BITS.get(dtype)
            if bits is not None and math.prod(shape) * bits != 8 * (end - begin):
                return None
            spans.append((begin, end))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    spans.sort()
    edges = [0, *(end for _, end in spans)]
    return document if [*(begin for begin, _ in spans), data_bytes] == edges else None


@settings(max_examples=400, deadline=None)
@given(case=headers(), data=st.data())
def test_mutated_headers_are_refused_or_read_correctly(
    case: tuple[bytes, int], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text, data_bytes = case
    for _ in range(data.draw(st.integers(1, 3))):
        low = data.draw(st.integers(0, len(text)))
        high = data.draw(st.integers(low, min(len(text), low + 4)))
        piece = data.draw(
            st.sampled_from([b"", b"0", b"-", b"1", b'"', b"}", b",", b"\\", b"\xff", b"e5", b"[", text[:40]])
        )
        text = text[:low] + piece + text[high:]
    path = write(tmp_path_factory.mktemp("h") / "a.safetensors", text, data_bytes)
    expected = strict_reading(text, data_bytes)
    try:
        header = read_header(path)
    except HeaderError as error:
        assert expected is None, (text, str(error))
        return
    assert expected is not None, text
    plain = {name: (e["dtype"], e["shape"], e["data_offsets"]) for name, e in expected.items()}
    assert as_plain(header, len(text)) == plain


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=64))
def test_any_bytes_are_refused_or_read(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("h") / "a.safetensors"
    path.write_bytes(content)
    try:
        read_header(path)
    except HeaderError as error:
        assert str(path) in str(error)
