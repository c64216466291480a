"""A first run on a machine, which compiles for half a minute before anything is loaded, says so; later ones do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from k3ray import starting
from k3ray.kernels import compile as compiling
from k3ray.kernels.norm import rmsnorm


class _Actors:
    """Actors that say when they are loaded."""

    def __init__(self, *_: object) -> None:
        self.stop = self.loaded_reports = list

    def load(self, loaded: Callable[[str], None]) -> None:
        loaded("layers 0..8")


def _said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What starting the actors says."""
    monkeypatch.setattr(starting, "ActorChain", _Actors)
    runtime: Any = SimpleNamespace(daemon_pids=dict, actor_options=None, node_id="n")
    lines: list[str] = []
    with starting.ExitStack() as running:
        starting._start(SimpleNamespace(), runtime, None, running, lines.append)  # type: ignore[arg-type]
    return lines


def test_a_cold_cache_is_said_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "cache_directory", lambda: tmp_path)
    (tmp_path / "lock").touch()  # all that a folder holds in which nothing was compiled
    cold = ["compiling the kernels, once for this machine, for up to a minute", "loaded: layers 0..8"]
    assert _said(monkeypatch) == cold
    monkeypatch.setattr(starting, "cache_directory", lambda: None)
    assert _said(monkeypatch) == cold


def test_a_warm_cache_is_not_worth_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache as a kernel that was just run has left it."""
    rmsnorm(np.ones((1, 32), np.float32), np.ones(32, np.float32), 1e-5)
    assert compiling.cache_directory() is not None
    assert _said(monkeypatch) == ["loaded: layers 0..8"]
