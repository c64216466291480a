"""What a download of days meets: an outage of the line, and a server that gives next to nothing."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from k3ray.download.revision import DownloadFailed
from k3ray.download.stream import LEAST_BYTES
from tests.downloads import QUICK, SHARD, assert_exact, fetch, quicken, total_journalled, wanted
from tests.local_hub import Asked, Fault, LocalHub

REFUSED = Fault("status", status=503, headers=(("retry-after", "0"),))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


def shards(hub: LocalHub) -> list[str]:
    return sorted(name for name in hub.files if name.endswith(".safetensors"))


def test_files_given_up_in_an_outage_are_fetched_when_others_come_again(hub: LocalHub, tmp_path: Path) -> None:
    """The line is gone for the first three shards' patience, and back for the fourth."""
    first = shards(hub)[:3]
    back = threading.Event()

    def faults(asked: Asked) -> Fault | None:
        if asked.name not in first and asked.name in shards(hub):
            back.set()
        return REFUSED if asked.name in first and not back.is_set() else None

    hub.faults = faults
    said: list[str] = []
    summary = fetch(hub, tmp_path, say=said.append, workers=1)
    assert_exact(hub, tmp_path)
    assert summary.fetched_bytes == summary.num_bytes == sum(len(hub.files[name]) for name in wanted(hub))
    assert f"given up and now tried once more: {', '.join(first)}" in said


def test_an_outage_that_does_not_end_has_an_end_here(hub: LocalHub, tmp_path: Path) -> None:
    """Every file is tried by itself, and once more only after another one came."""
    hub.faults = lambda asked: REFUSED if asked.name in shards(hub)[:2] else None
    with pytest.raises(DownloadFailed, match=r"2 of 5 files could not be fetched:(.|\n)*given up(.|\n)*given up"):
        fetch(hub, tmp_path)
    for name in shards(hub)[:2]:
        assert sum(asked.name == name for asked in hub.asked) == 2 * QUICK.attempts
    hub.asked.clear()
    hub.faults = lambda asked: REFUSED
    with pytest.raises(DownloadFailed, match="2 of 5 files"):
        fetch(hub, tmp_path)
    assert len(hub.asked) == 2 * QUICK.attempts


def test_a_file_of_another_content_is_not_tried_once_more(hub: LocalHub, tmp_path: Path) -> None:
    hub.faults = lambda asked: Fault("corrupt", 7) if asked.name == SHARD else None
    said: list[str] = []
    with pytest.raises(DownloadFailed, match="1 of 5 files"):
        fetch(hub, tmp_path, say=said.append)
    assert not any("once more" in line for line in said)


def test_a_server_that_gives_next_to_nothing_is_given_up_and_its_bytes_are_kept(hub: LocalHub, tmp_path: Path) -> None:
    """One byte an answer would take a shard for ever, and each would count as progress."""
    hub.faults = lambda asked: Fault("cut", 1) if asked.name == SHARD and len(hub.asked) < 100 else None
    with pytest.raises(
        DownloadFailed, match=rf"{SHARD}: given up at byte \d+ of 1884608 after {QUICK.attempts} attempts"
    ):
        fetch(hub, tmp_path)
    kept = total_journalled(tmp_path, SHARD)
    assert QUICK.attempts <= kept <= 2 * QUICK.attempts
    hub.asked.clear()
    hub.faults = lambda asked: Fault("cut", LEAST_BYTES) if asked.name == SHARD and len(hub.asked) < 20 else None
    fetch(hub, tmp_path)
    assert_exact(hub, tmp_path)
    assert hub.asked[0].begin == kept
