"""Tensor names as numbers: a template and up to two whole numbers, in one 64-bit key, so that no name is kept.

`model.layers.7.mlp.experts.12.w1` is the template `model.layers.#.mlp.experts.#.w1` with 7 and 12. Only a whole dotted
component of digits is a number, written without leading zeros and below MAX_NUMBER; from the third on such components
stay in the template, and a name with a `#` of its own is its own template. So key and name are one to one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from k3ray.workers.failure import Failure

NUMBER_BITS = 20
MAX_NUMBER = (1 << NUMBER_BITS) - 1  # a number n is kept as n + 1, and 0 says that there is none
MAX_TEMPLATES = 1 << (64 - 2 * NUMBER_BITS)
PLACE = "#"
_DOT, _ZERO, _HASH = ord("."), ord("0"), ord(PLACE)
_NUMBER = re.compile(r"0|[1-9][0-9]{0,6}")

Keys = npt.NDArray[np.uint64]


class TooManyTemplates(Failure):
    """More unlike tensor names than the index can number."""

    def __init__(self) -> None:
        super().__init__(f"found more than {MAX_TEMPLATES} unlike tensor names, expected a model's few dozen kinds")


class NameTable:
    """The templates of one checkpoint, numbered in the order they came, and the way between names and keys."""

    def __init__(self, templates: Iterable[str] = ()) -> None:
        self.templates = list(templates)
        self._ids = {template: number for number, template in enumerate(self.templates)}

    def add(self, names: pa.Array) -> Keys:
        """The keys (names,) of many names (a large_string array) at once; their templates are added to the table."""
        offsets, text = _buffers(names)
        templates, numbers = _cut_numbers(offsets, text, len(names))
        encoded = templates.dictionary_encode()
        ids = np.array([self._intern(template) for template in encoded.dictionary.to_pylist()], dtype=np.uint64)
        keys = ids[encoded.indices.to_numpy()] if len(names) else np.empty(0, dtype=np.uint64)
        return (keys << np.uint64(2 * NUMBER_BITS)) | (numbers[0] << np.uint64(NUMBER_BITS)) | numbers[1]

    def key(self, name: str) -> int | None:
        """The key of one name, or None when no tensor of this checkpoint has its template."""
        parts = name.split(".")
        numbers: list[int] = []
        if PLACE not in name:
            for place, part in enumerate(parts):
                if len(numbers) < 2 and _NUMBER.fullmatch(part) and int(part) < MAX_NUMBER:
                    numbers.append(int(part) + 1)
                    parts[place] = PLACE
        template = self._ids.get(".".join(parts))
        if template is None:
            return None
        first, second = (*numbers, 0, 0)[:2]
        return (template << 2 * NUMBER_BITS) | (first << NUMBER_BITS) | second

    def name(self, key: int) -> str:
        """The name that a key stands for."""
        name = self.templates[key >> 2 * NUMBER_BITS]
        for number in ((key >> NUMBER_BITS) & MAX_NUMBER, key & MAX_NUMBER):
            if number:
                name = name.replace(PLACE, str(number - 1), 1)
        return name

    def template_id(self, template: str) -> int | None:
        """The number of a template, or None when no tensor has it."""
        return self._ids.get(template)

    def _intern(self, template: str) -> int:
        number = self._ids.get(template)
        if number is None:
            number = self._ids[template] = len(self.templates)
            if number >= MAX_TEMPLATES:
                raise TooManyTemplates()
            self.templates.append(template)
        return number


def template_of(keys: Keys) -> npt.NDArray[np.int64]:
    """The template numbers of keys."""
    return (keys >> np.uint64(2 * NUMBER_BITS)).astype(np.int64)


def numbers_of(keys: Keys) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The two numbers of each key, -1 where there is none."""
    first = ((keys >> np.uint64(NUMBER_BITS)) & np.uint64(MAX_NUMBER)).astype(np.int64) - 1
    return first, (keys & np.uint64(MAX_NUMBER)).astype(np.int64) - 1


def _buffers(array: pa.Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Offsets (names + 1,) from 0 and the UTF-8 bytes of a large_string array or a slice of one."""
    if not len(array):
        return np.zeros(1, dtype=np.int64), np.empty(0, dtype=np.uint8)
    _, offsets, data = array.buffers()
    starts = np.frombuffer(offsets, dtype=np.int64)[array.offset : array.offset + len(array) + 1]
    text = np.empty(0, dtype=np.uint8) if data is None else np.frombuffer(data, dtype=np.uint8)
    return starts - starts[0], text[int(starts[0]) : int(starts[-1])]


def _cut_numbers(
    offsets: npt.NDArray[np.int64], text: npt.NDArray[np.uint8], count: int
) -> tuple[pa.Array, list[Keys]]:
    """The templates of `count` names as a string array, and their two numbers plus one (0: none) as two columns."""
    starts, lengths, values = _number_components(offsets, text)
    owners = np.searchsorted(offsets, starts, side="right") - 1
    hashes = np.flatnonzero(text == _HASH)
    if len(hashes):  # names with a # of their own keep their digits
        free = ~np.isin(owners, np.searchsorted(offsets, hashes, side="right") - 1)
        starts, lengths, values, owners = starts[free], lengths[free], values[free], owners[free]
    rank = np.arange(len(owners)) - np.searchsorted(owners, owners)
    columns = []
    for place in (0, 1):
        column = np.zeros(count, dtype=np.uint64)
        chosen = rank == place
        column[owners[chosen]] = values[chosen] + 1
        columns.append(column)
    starts, lengths, owners = starts[rank < 2], lengths[rank < 2], owners[rank < 2]
    rewritten = text.copy()
    rewritten[starts] = _HASH
    keep = np.ones(len(text), dtype=np.bool_)
    for digit in range(1, int(lengths.max(initial=1))):
        keep[starts[lengths > digit] + digit] = False
    removed = np.zeros(count + 1, dtype=np.int64)
    np.add.at(removed, owners + 1, lengths - 1)
    new_offsets = offsets - np.cumsum(removed)
    buffers = [None, pa.py_buffer(new_offsets), pa.py_buffer(rewritten[keep])]
    return pa.Array.from_buffers(pa.large_string(), count, buffers), columns


def _number_components(
    offsets: npt.NDArray[np.int64], text: npt.NDArray[np.uint8]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
    """Start, length and value of every component that is a number, over all names, ascending."""
    boundary = np.zeros(len(text) + 1, dtype=np.bool_)  # where a component may begin; one less is where it must end
    boundary[1:] = text == _DOT
    boundary[offsets] = True
    ends = np.append(text == _DOT, True)
    ends[offsets[:-1]] = True  # the byte that begins the next name ends this one's last component
    digits = np.append(text - np.uint8(_ZERO), np.uint8(255))  # wraps: everything that is no digit is 10 or more
    starts = np.flatnonzero((digits < 10) & boundary)
    values = np.zeros(len(starts), dtype=np.uint64)
    lengths = np.zeros(len(starts), dtype=np.int64)
    open_ = np.arange(len(starts))  # components whose end is not yet seen
    good = np.zeros(len(starts), dtype=np.bool_)
    for length in range(8):
        here = starts[open_] + length
        if length:
            done = ends[here]
            good[open_[done]] = True
            open_, here = open_[~done], here[~done]
        going = digits[here] < 10
        open_, here = open_[going], here[going]
        values[open_] = values[open_] * np.uint64(10) + digits[here]
        lengths[open_] += 1
    good &= (values < MAX_NUMBER) & ~((lengths > 1) & (digits[starts] == 0))
    return starts[good], lengths[good], values[good]
