"""Fixtures of several test files: a place for a run with Ray, of which nothing is left."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.ray_places import Place, make_place


@pytest.fixture
def place() -> Iterator[Place]:
    """It has to be empty again at the end."""
    made = make_place()
    yield made
    try:
        made.await_nothing_left()
    finally:
        shutil.rmtree(made.path)
