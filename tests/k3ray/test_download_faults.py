"""Every fault of a download at seeded random bytes: the copy is exact, and nothing that was proven is fetched again."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from k3ray.download.counts import Counts, Reached
from k3ray.download.file_fetch import WHOLE_ATTEMPTS
from k3ray.download.patience import Patience
from k3ray.download.revision import DownloadFailed
from tests.downloads import (
    QUICK,
    SHARD,
    assert_asks_for_nothing_proven,
    assert_exact,
    fetch,
    journalled,
    quicken,
    total_journalled,
    wanted,
)
from tests.local_hub import Asked, Fault, LocalHub


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


KINDS = (
    "cut",
    "stall",
    "short",
    "ignore_range",
    "other_size",
    "other_start",
    "wrong_length",
    "status",
    "gzip",
    "longer",
)


@pytest.mark.parametrize("seed", range(50))
def test_an_interruption_at_a_random_byte_ends_in_an_exact_copy(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Runs are interrupted (a Ctrl-C in a silent server at a random byte, or a file given up) until one is through."""
    chance = random.Random(seed)
    directory = tmp_path / "model"
    check = assert_asks_for_nothing_proven(directory)
    silent: list[Asked] = []
    left = [Fault("stall", chance.randrange(len(hub.files[SHARD])), seconds=2.0)]  # one Ctrl-C, then other faults
    for _ in range(chance.randrange(1, 8)):
        kind = chance.choice([name for name in KINDS if name != "stall"])
        status = chance.choice([429, 500, 502, 503, 404, 403, 416])
        left.append(Fault(kind, chance.randrange(1_900_000), status, (("retry-after", "0"),)))

    def faults(asked: Asked) -> Fault | None:
        if asked.name.endswith(".safetensors") and left and chance.random() < 0.6:
            fault = left.pop()
            if fault.kind == "stall":
                silent.append(asked)
            return fault
        return None

    def look(_: Reached) -> None:
        if (
            silent
            and silent[0].fault is not None
            and silent[0].sent >= min(silent[0].fault.at, silent[0].end - silent[0].begin)
        ):
            silent.clear()
            raise KeyboardInterrupt

    hub.faults, hub.before = faults, check
    impatient = Patience(
        attempts=chance.choice([1, 2, 4]), first_wait_s=0.001, longest_wait_s=0.002, stall_s=20.0, grace_s=0.05
    )
    arrived: list[int] = []
    count_fetched = Counts.fetched
    monkeypatch.setattr(Counts, "fetched", lambda self, count: (arrived.append(count), count_fetched(self, count)))
    interruptions = 0
    while True:
        try:
            fetch(hub, directory, impatient, look=look, workers=chance.choice([1, 2, 4]))
            break
        except (KeyboardInterrupt, DownloadFailed):
            interruptions += 1
            assert interruptions < 30
    assert_exact(hub, directory)
    assert check.failures == []  # type: ignore[attr-defined]
    assert {name: total_journalled(directory, name) for name in wanted(hub)} == {
        name: len(hub.files[name]) for name in wanted(hub)
    }
    assert sum(arrived) == sum(len(hub.files[name]) for name in wanted(hub))


@pytest.mark.parametrize("kind", KINDS)
def test_each_fault_is_survived_in_one_run(hub: LocalHub, tmp_path: Path, kind: str) -> None:
    """A fault at every third request for a shard's bytes, with answers never longer than some blocks."""
    chance = random.Random(kind)
    counts: dict[str, int] = {}

    def faults(asked: Asked) -> Fault | None:
        count = counts[asked.name] = counts.get(asked.name, 0) + 1
        if count % 3 == 2 and asked.name.endswith(".safetensors"):
            return Fault(kind, chance.randrange(300_000), 503, (("retry-after", "0"),))
        return Fault("cut", chance.randrange(1, 400_000)) if count % 3 == 1 else None

    hub.faults = faults
    check = hub.before = assert_asks_for_nothing_proven(tmp_path)
    patience = replace(QUICK, stall_s=0.7, attempts=10) if kind == "stall" else QUICK
    summary = fetch(hub, tmp_path, patience)
    assert_exact(hub, tmp_path)
    assert check.failures == []  # type: ignore[attr-defined]
    assert summary.fetched_bytes == sum(len(hub.files[name]) for name in wanted(hub))
    assert any(asked.fault is not None and asked.fault.kind == kind for asked in hub.asked)


def test_a_server_that_always_ignores_ranges_is_survived_and_told(hub: LocalHub, tmp_path: Path) -> None:
    cut = [Fault("cut", 1_000_000)]
    hub.faults = lambda asked: (cut.pop() if cut else Fault("ignore_range")) if asked.name == SHARD else None
    said: list[str] = []
    summary = fetch(hub, tmp_path, say=said.append)
    assert_exact(hub, tmp_path)
    assert summary.fetched_bytes == sum(len(hub.files[name]) for name in wanted(hub))
    assert summary.transferred_again_bytes == 1_000_000
    assert any("ignored the range" in line and "its first 1000000 bytes come again" in line for line in said)


def test_a_body_with_a_flipped_bit_is_thrown_away(hub: LocalHub, tmp_path: Path) -> None:
    wrong = [Fault("corrupt", 1_234_567)]
    hub.faults = lambda asked: wrong.pop() if asked.name == SHARD and wrong else None
    said: list[str] = []
    fetch(hub, tmp_path, say=said.append)
    assert_exact(hub, tmp_path)
    assert any(SHARD in line and "attempt 1 of 3 is thrown away" in line for line in said)


def test_a_mirror_with_another_content_is_given_up_and_its_file_is_not_there(hub: LocalHub, tmp_path: Path) -> None:
    hub.faults = lambda asked: Fault("corrupt", 7) if asked.name == SHARD else None
    with pytest.raises(DownloadFailed, match=rf"1 of 5 files(.|\n)*{SHARD}: .* another content {WHOLE_ATTEMPTS} times"):
        fetch(hub, tmp_path)
    assert not (tmp_path / SHARD).exists()
    assert sum(asked.name == SHARD for asked in hub.asked) == WHOLE_ATTEMPTS
    others = [name for name in wanted(hub) if name != SHARD]
    assert all((tmp_path / name).read_bytes() == hub.files[name] for name in others)


def test_a_mirror_of_another_size_is_told_with_both_sizes(hub: LocalHub, tmp_path: Path) -> None:
    hub.listed = dict(hub.files)
    hub.files = {**hub.files, SHARD: hub.files[SHARD][:-5]}
    size = len(hub.listed[SHARD])
    with pytest.raises(DownloadFailed, match=rf"{SHARD}: given up at byte 0 of {size}.*{size - 5}"):
        fetch(hub, tmp_path)
    assert not (tmp_path / SHARD).exists()


def test_a_file_shorter_at_the_end_than_the_metadata_says_keeps_what_came(hub: LocalHub, tmp_path: Path) -> None:
    """The redirect's target holds fewer bytes: 416 past its end, and the part stays."""
    hub.faults = lambda asked: (
        (Fault("status", status=416) if asked.begin else Fault("cut", 900_000)) if asked.name == SHARD else None
    )
    with pytest.raises(DownloadFailed, match=r"given up at byte 900000 of 1884608.*answered 416.*another size"):
        fetch(hub, tmp_path)
    assert sum(end - begin for begin, end in journalled(tmp_path, SHARD)) == 900_000
