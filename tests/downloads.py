"""Running a download in a test, and the checks that every one must pass, read independently of the project."""

from __future__ import annotations

import hashlib
import os
import ssl
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest

from k3ray.download import part_file
from k3ray.download.counts import Reached
from k3ray.download.download import Summary, Wish, download
from k3ray.download.hub import Hub
from k3ray.download.patience import Patience
from k3ray.download.record import FOLDER
from tests.local_hub import Asked, LocalHub

QUICK = Patience(attempts=4, first_wait_s=0.001, longest_wait_s=0.004, stall_s=10.0, grace_s=0.05)
BLOCK = 1 << 17
SHARD = "model-00002-of-000005.safetensors"
Extent = tuple[int, int]


@lru_cache(maxsize=4)
def _tls_context(*settings: object) -> ssl.SSLContext:
    return ssl.create_default_context()


def quicken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks, so that small files have several, and nothing that takes time and is not what is tested.

    No power is cut here, so nothing is flushed to the disk; certificates, of which the loopback has none, are read
    once.
    """
    monkeypatch.setattr(part_file, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr("httpx._transports.default.create_ssl_context", lambda verify, cert, trust_env: _tls_context())


def nothing(_: object) -> None:
    pass


def fetch(
    hub: LocalHub,
    directory: Path,
    patience: Patience = QUICK,
    say: Callable[[str], None] = nothing,
    look: Callable[[Reached], None] = nothing,
    **wish: object,
) -> Summary:
    return download(Wish(directory, **wish), Hub(hub.endpoint, token="hf_hidden"), patience, say, look)  # type: ignore[arg-type]


def wanted(hub: LocalHub) -> list[str]:
    """What a whole download brings."""
    small = ["config.json", "generation_config.json", "model.safetensors.index.json", "tiktoken.model"]
    return [*small, "tokenizer_config.json", *(name for name in hub.files if name.endswith(".safetensors"))]


def assert_exact(hub: LocalHub, directory: Path) -> None:
    for name in wanted(hub):
        assert (directory / name).read_bytes() == hub.files[name], name
    assert not list((directory / FOLDER).glob("*.part"))
    assert sorted(path.name for path in directory.iterdir() if path.is_file()) == sorted(wanted(hub))


def journalled(directory: Path, name: str) -> list[Extent]:
    """The extents that a journal records and that are on the disk as recorded, read independently of the project."""
    journal, part = directory / FOLDER / f"{name}.blocks", directory / FOLDER / f"{name}.part"
    if not journal.is_file() or not part.is_file():
        return []
    data, found = part.read_bytes(), []
    for line in journal.read_text().splitlines()[1:]:
        begin, end, digest = line.split()
        if hashlib.blake2b(data[int(begin) : int(end)], digest_size=16).hexdigest() == digest:
            found.append((int(begin), int(end)))
    return found


def assert_asks_for_nothing_proven(directory: Path) -> Callable[[Asked], None]:
    """A check before every answer, in the server's thread; its failures are kept."""
    failures: list[str] = []

    def check(asked: Asked) -> None:
        for begin, end in journalled(directory, asked.name):
            if begin < asked.end and asked.begin < end:
                failures.append(f"{asked.name}: asked for {asked.begin}-{asked.end}, has {begin}-{end}")

    check.failures = failures  # type: ignore[attr-defined]
    return check


def total_journalled(directory: Path, name: str) -> int:
    """Bytes of all lines a journal ever got: more than the file's size when a byte was written twice."""
    lines = (directory / FOLDER / f"{name}.blocks").read_text().splitlines()[1:]
    return sum(int(line.split()[1]) - int(line.split()[0]) for line in lines)
