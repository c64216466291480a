"""Messages on the disk: the bytes as they were given, gone when nobody refers to them, kept where the disk is full."""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3ray.cluster.kept_messages import SEGMENT_BYTES, MessageKeeper


@given(st.lists(st.binary(max_size=300), max_size=20))
def test_every_message_is_read_as_it_was_given(contents: list[bytes]) -> None:
    keeper = MessageKeeper()
    kept = [keeper.keep(pa.py_buffer(one)) for one in contents]
    assert [one.read().to_pybytes() for one in kept] == contents and [one.size for one in kept] == list(
        map(len, contents)
    )


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_file_goes_with_its_last_message() -> None:
    gc.collect()
    before, keeper, large = open_files(), MessageKeeper(), pa.py_buffer(bytes(SEGMENT_BYTES))
    kept = [keeper.keep(large) for _ in range(3)]
    assert open_files() == before + 3
    del kept[0]
    assert open_files() == before + 2
    last = kept.pop()
    kept.clear()
    keeper.forget()
    assert open_files() == before + 1 and last.read().equals(large)


def test_a_full_disk_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = MessageKeeper()
    first = keeper.keep(pa.py_buffer(b"on the disk"))

    def full(*arguments: object, **named: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    second = keeper.keep(pa.py_buffer(b"in memory"))
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    third = keeper.keep(pa.py_buffer(b"in memory too"))
    assert [one.read().to_pybytes() for one in (first, second, third)] == [
        b"on the disk",
        b"in memory",
        b"in memory too",
    ]
