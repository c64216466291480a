"""The JSON of a safetensors header, strictly: every entry has its three fields, of the right types, and no key twice.

Two ways to the same answer. The fast one decodes into typed records and proves that no key was repeated by counting; it
gives up on anything unusual. The strict one then finds what is wrong and names the tensor, or, where nothing is wrong
(a quote in a name, say), gives the entries.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import numpy as np

from k3ray.workers.failure import Failure

MAX_INTEGER = 2**63 - 1
METADATA_KEY = "__metadata__"
_FIELDS = ("dtype", "shape", "data_offsets")
_WHOLE = f"whole numbers from 0 to {MAX_INTEGER}"

Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_INTEGER)]


class HeaderError(Failure):
    """A shard whose header or size contradicts itself: names the file, the tensor and the numbers."""

    def __init__(self, path: Path, tensor: str | None, found: str, expected: str) -> None:
        self.path = path
        self.tensor = tensor
        subject = f"{path}: " if tensor is None else f"{path}: tensor {show_name(tensor)}: "
        super().__init__(
            f"{subject}found {found}, expected {expected}. The file is damaged, cut short or not a safetensors shard: "
            "compare its size and checksum with the published ones and fetch it again."
        )


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One tensor as its header states it; offsets are relative to the header's end."""

    dtype: str
    shape: tuple[Size, ...]
    data_offsets: tuple[Size, Size]


_ENTRIES = msgspec.json.Decoder(dict[str, Entry])
_TEXTS = msgspec.json.Decoder(dict[str, str])
# The metadata object where writers put it, first, with no brace in it; what follows must be the next key or the end.
_METADATA = re.compile(
    rb'\{[ \t\r\n]*"__metadata__"[ \t\r\n]*:[ \t\r\n]*(\{[^{}]*\})[ \t\r\n]*(?:,[ \t\r\n]*(?=")|(?=\}))'
)


def show_name(name: str) -> str:
    """A tensor's name as it can be printed: quoted, control characters and lone surrogates escaped, cut when long."""
    text = json.dumps(name)
    return text if len(text) <= 200 else f'{text[:180]}..." ({len(name)} characters)'


def decode_entries(text: bytes, path: Path) -> tuple[list[str], list[Entry]]:
    """Names and entries of a header's JSON in its order, without the metadata; raises HeaderError."""
    entries = _decode_fast(text)
    if entries is None:
        try:
            entries = _decode_strictly(text, path)
        except RecursionError as error:
            raise HeaderError(path, None, "a header nested too deeply", "one object of tensors") from error
    return list(entries), list(entries.values())


def _decode_fast(text: bytes) -> dict[str, Entry] | None:
    """The entries, or None when this way cannot prove that they are right.

    An entry written once has ten quotes around its strings: its name, its three keys and its dtype. An entry that a
    later one of the same name replaced, a key written twice and a quote inside a string add to them, so ten quotes for
    each name kept leave no room for any.
    """
    body = text
    try:
        if (found := _METADATA.match(text)) is not None:
            metadata = _TEXTS.decode(found[1])
            if count_quotes(found[1]) != 4 * len(metadata):
                return None
            body = b"{" + text[found.end() :]
        entries = _ENTRIES.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if METADATA_KEY in entries or count_quotes(body) != 10 * len(entries):
        return None
    return entries


def count_quotes(text: bytes) -> int:
    """How many bytes are a quotation mark."""
    return int(np.count_nonzero(np.frombuffer(text, dtype=np.uint8) == ord('"')))


class _Pairs(list[tuple[str, Any]]):
    """A JSON object with its keys as written, repeated ones included."""


def _decode_strictly(text: bytes, path: Path) -> dict[str, Entry]:
    def refuse_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a JSON number")

    try:
        root = json.loads(text.decode("utf-8"), object_pairs_hook=_Pairs, parse_constant=refuse_constant)
    except ValueError as error:  # bad JSON, bad UTF-8, NaN, or an integer of thousands of digits
        raise HeaderError(path, None, f"a header that is not JSON ({error})", "one JSON object of tensors") from error
    if not isinstance(root, _Pairs):
        raise HeaderError(path, None, f"a header that is a JSON {type(root).__name__}", "one object of tensors")
    if (repeated := _repeated(key for key, _ in root)) is not None:
        raise HeaderError(path, repeated, "the name more than once in the header", "each tensor once")
    entries = {}
    for name, value in root:
        if name == METADATA_KEY:
            _check_metadata(value, path)
        else:
            entries[name] = _entry(name, value, path)
    return entries


def _entry(name: str, value: Any, path: Path) -> Entry:
    if not isinstance(value, _Pairs):
        raise HeaderError(path, name, _show(value), "an object with dtype, shape and data_offsets")
    keys = [key for key, _ in value]
    if (repeated := _repeated(keys)) is not None:
        raise HeaderError(path, name, f"its field {show_name(repeated)} more than once", "each field once")
    if set(keys) != set(_FIELDS):
        found = ", ".join(show_name(key) for key in keys[:8])
        raise HeaderError(path, name, f"the fields [{found}]", "exactly dtype, shape and data_offsets")
    fields = dict(value)
    dtype, shape, offsets = (fields[field] for field in _FIELDS)
    if not isinstance(dtype, str) or not dtype.isascii():
        raise HeaderError(path, name, f"dtype {_show(dtype)}", "a string such as BF16")
    try:
        name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise HeaderError(path, name, "a name with a lone surrogate", "a name that is Unicode text") from error
    if not _are_sizes(shape):
        raise HeaderError(path, name, f"shape {_show(shape)}", f"a list of {_WHOLE}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise HeaderError(path, name, f"data_offsets {_show(offsets)}", f"[begin, end], {_WHOLE}")
    return Entry(dtype, tuple(shape), (offsets[0], offsets[1]))


def _are_sizes(value: Any) -> bool:
    return type(value) is list and all(type(item) is int and 0 <= item <= MAX_INTEGER for item in value)


def _check_metadata(value: Any, path: Path) -> None:
    if not isinstance(value, _Pairs) or not all(isinstance(text, str) for _, text in value):
        raise HeaderError(path, METADATA_KEY, _show(value), "an object of strings, which may be empty")
    if (repeated := _repeated(key for key, _ in value)) is not None:
        raise HeaderError(path, METADATA_KEY, f"the key {show_name(repeated)} more than once", "each key once")


def _repeated(keys: Iterable[str]) -> str | None:
    """The first key that occurs a second time."""
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            return key
        seen.add(key)
    return None


def _show(value: Any) -> str:
    text = json.dumps(dict(value) if isinstance(value, _Pairs) else value)
    return text if len(text) <= 100 else f"{text[:80]}... ({len(text)} characters)"
