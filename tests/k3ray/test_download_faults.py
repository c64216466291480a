"""Every fault of a download at seeded random bytes: the copy is exact, and nothing that was proven is fetched again."""

from __future__ import annotations

import errno
import hashlib
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from k3ray.download import part_file
from k3ray.download.counts import Counts, Reached
from k3ray.download.download import Summary, Wish, download
from k3ray.download.file_fetch import WHOLE_ATTEMPTS
from k3ray.download.hub import Hub
from k3ray.download.patience import Patience
from k3ray.download.record import FOLDER
from k3ray.download.revision import DownloadFailed
from k3ray.download.workplace import NoSpace
from tests.local_hub import Asked, Fault, LocalHub, serving

QUICK = Patience(attempts=4, first_wait_s=0.001, longest_wait_s=0.004, stall_s=0.4, grace_s=0.05)
BLOCK = 1 << 17
SHARD = "model-00002-of-000005.safetensors"
Extent = tuple[int, int]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_file, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # no power is cut here, and a test makes thousands


@pytest.fixture
def hub(k3b_dir: Path) -> Iterator[LocalHub]:
    """The golden checkpoint, as a repository."""
    files = {path.name: path.read_bytes() for path in sorted(k3b_dir.iterdir()) if path.name != "golden.npz"}
    with serving(LocalHub(files)) as hub:
        yield hub


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
        attempts=chance.choice([1, 2, 4]), first_wait_s=0.001, longest_wait_s=0.002, stall_s=5.0, grace_s=0.05
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
    summary = fetch(hub, tmp_path)
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
