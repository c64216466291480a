"""What a second download finds in the folder: finished, changed, damaged and foreign files, torn parts, a full disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from k3ray.download import part_file
from k3ray.download.record import FOLDER
from k3ray.download.workplace import NoSpace
from tests.downloads import (
    BLOCK,
    SHARD,
    assert_asks_for_nothing_proven,
    assert_exact,
    fetch,
    quicken,
    wanted,
)
from tests.local_hub import LocalHub


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


def test_finished_shards_are_not_touched_and_a_changed_one_is_fetched_block_by_block(
    hub: LocalHub, tmp_path: Path
) -> None:
    fetch(hub, tmp_path)
    before = {name: (tmp_path / name).stat() for name in wanted(hub)}
    damaged = bytearray(hub.files[SHARD])
    damaged[1_000_000] ^= 1  # in block 7, which is bytes 917504..1048575
    (tmp_path / SHARD).write_bytes(damaged)
    hub.asked.clear()
    summary = fetch(hub, tmp_path)
    assert_exact(hub, tmp_path)
    assert [(asked.name, asked.begin, asked.end) for asked in hub.asked] == [(SHARD, 7 * BLOCK, 8 * BLOCK)]
    assert (summary.fetched_bytes, summary.kept_files) == (BLOCK, 9)
    for name in set(wanted(hub)) - {SHARD}:
        after = (tmp_path / name).stat()
        assert (after.st_ino, after.st_mtime_ns) == (before[name].st_ino, before[name].st_mtime_ns)


def test_a_finished_shard_that_was_removed_is_fetched_as_one_that_never_came(hub: LocalHub, tmp_path: Path) -> None:
    """Its journal is still there, and says nothing of a file that is gone."""
    fetch(hub, tmp_path)
    (tmp_path / SHARD).unlink()
    hub.bytes_per_s = 4e6
    said: list[str] = []
    here: list[int] = []
    summary = fetch(hub, tmp_path, say=said.append, look=lambda reached: here.append(reached.here))
    assert_exact(hub, tmp_path)
    assert summary.fetched_bytes == len(hub.files[SHARD])
    assert said == [] and min(here) >= 0 and max(here) <= len(hub.files[SHARD])


def test_a_damage_that_keeps_the_time_of_change_is_found_by_deep_only(hub: LocalHub, tmp_path: Path) -> None:
    fetch(hub, tmp_path)
    stat = (tmp_path / SHARD).stat()
    with (tmp_path / SHARD).open("r+b") as file:
        file.seek(5)
        file.write(b"\xff")
    os.utime(tmp_path / SHARD, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert fetch(hub, tmp_path).fetched_bytes == 0
    assert fetch(hub, tmp_path, deep=True).fetched_bytes == BLOCK
    assert_exact(hub, tmp_path)


def test_shards_from_elsewhere_are_kept_when_right_and_replaced_when_not(hub: LocalHub, tmp_path: Path) -> None:
    right, short, wrong = (f"model-0000{number}-of-000005.safetensors" for number in (1, 2, 3))
    (tmp_path / right).write_bytes(hub.files[right])
    (tmp_path / short).write_bytes(hub.files[short][:-1])
    (tmp_path / wrong).write_bytes(bytes(len(hub.files[wrong])))
    said: list[str] = []
    fetch(hub, tmp_path, say=said.append)
    assert_exact(hub, tmp_path)
    assert right not in {asked.name for asked in hub.asked}
    assert any(f"{short}: here with 1884607 bytes, expected 1884608" in line for line in said)
    assert any(f"{wrong}: here with the right size, and its sha256 is" in line for line in said)


def test_a_complete_part_is_finished_without_a_request(hub: LocalHub, tmp_path: Path) -> None:
    fetch(hub, tmp_path)
    (tmp_path / SHARD).replace(tmp_path / FOLDER / f"{SHARD}.part")
    hub.asked.clear()
    assert fetch(hub, tmp_path).fetched_bytes == 0
    assert hub.asked == []
    assert_exact(hub, tmp_path)


@pytest.mark.parametrize("how", ["torn", "longer", "zeros", "gone", "journal of another file"])
def test_a_part_that_is_not_what_its_journal_says(hub: LocalHub, tmp_path: Path, how: str) -> None:
    """What a power cut, or a copy, may leave: only what is proven is kept."""
    fetch(hub, tmp_path)
    part, journal = tmp_path / FOLDER / f"{SHARD}.part", tmp_path / FOLDER / f"{SHARD}.blocks"
    (tmp_path / SHARD).replace(part)
    size, missing = len(hub.files[SHARD]), 0
    if how == "torn":
        os.truncate(part, size - 3 * BLOCK)
        journal.write_bytes(journal.read_bytes()[:-20])  # the last line is torn as well
        missing = size - 11 * BLOCK  # the cut goes through block 11
    elif how == "longer":
        with part.open("ab") as file:
            file.write(b"more")
    elif how == "zeros":
        with part.open("r+b") as file:
            file.seek(BLOCK)
            file.write(bytes(2 * BLOCK))
        missing = 2 * BLOCK
    elif how == "gone":
        part.unlink()
        missing = size
    else:
        journal.write_bytes(journal.read_bytes().replace(b" sha256 ", b" sha256 0", 1))
        missing = size
    assert fetch(hub, tmp_path).fetched_bytes == missing
    assert_exact(hub, tmp_path)


def test_a_full_disk_is_told_and_what_was_written_is_kept(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, room = os.pwrite, [5 * BLOCK]

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        if len(data) > 100_000:
            room[0] -= len(data)
            if room[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, offset)

    monkeypatch.setattr(part_file.os, "pwrite", pwrite)
    check = hub.before = assert_asks_for_nothing_proven(tmp_path)
    with pytest.raises(NoSpace, match=r"No space left on device.*what was written is kept: free some space"):
        fetch(hub, tmp_path, workers=1)
    monkeypatch.setattr(part_file.os, "pwrite", real)
    fetch(hub, tmp_path)
    assert_exact(hub, tmp_path)
    assert check.failures == []  # type: ignore[attr-defined]
