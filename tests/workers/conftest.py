"""Fixtures of several test files: the golden checkpoint to be packed, and what an undisturbed pack of it writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

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
