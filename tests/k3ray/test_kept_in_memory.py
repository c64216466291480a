"""Temporary files that lie in memory or have too little room are told of, as no plan counts them."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from k3ray.cluster.recovery_plan import RecoverySettings
from k3ray.starting import kept_in_memory
from k3ray.workers.model.config import read_config

GROWN = replace(read_config(Path(__file__).parents[1] / "data" / "k3b"), kv_lora_rank=4096)


def request(snapshot_every: int, log_bytes: int = 32 << 20) -> Any:
    settings = RecoverySettings(snapshot_every=snapshot_every, log_bytes=log_bytes)
    return SimpleNamespace(checkpoint=SimpleNamespace(config=GROWN), recovery=settings)


def test_only_what_is_large_and_in_memory_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/dev/shm")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 40))
    (line,) = kept_in_memory(request(64), 10_000)
    assert line.startswith("/dev/shm is in memory, and up to 1.02 GB of snapshots") and "TMPDIR" in line
    assert list(kept_in_memory(request(0), 10_000)) == []  # no snapshots: only the messages
    assert list(kept_in_memory(request(64), 10)) == []
    assert list(kept_in_memory(request(0, log_bytes=1 << 30), 10))
    monkeypatch.setattr("k3ray.starting.is_in_memory", lambda folder: False)
    assert list(kept_in_memory(request(64), 10_000)) == []


def test_a_folder_with_too_little_room_is_told_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its state at 10,000 positions twice and the messages are 1.02 GB."""
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr("k3ray.starting.is_in_memory", lambda folder: False)
    for free, told in ((1_000_000_000, True), (1_100_000_000, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
        lines = list(kept_in_memory(request(64), 10_000))
        assert bool(lines) == told
        assert not told or lines[0].startswith(f"{tmp_path} has 1.00 GB free, and up to 1.02 GB of snapshots")
