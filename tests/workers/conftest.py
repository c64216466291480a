"""Fixtures of several test files: a small checkpoint and a place for its index, the golden one and a pack of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.indexes import small_checkpoint
from tests.tapes import Model, files_of, opened_model


@pytest.fixture(scope="module")
def model(k3b_dir: Path) -> Iterator[Model]:
    """The golden checkpoint, its shards open."""
    with opened_model(k3b_dir) as found:
        yield found


@pytest.fixture(scope="module")
def good(model: Model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of an undisturbed pack."""
    out = tmp_path_factory.mktemp("good") / "tape"
    model.pack(out)
    return files_of(out)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two shards and its index file."""
    return small_checkpoint(tmp_path / "model")


@pytest.fixture
def cache(tmp_path: Path) -> list[Path]:
    """Where its index may be kept."""
    return [tmp_path / "cache" / "index"]
