"""Files' bytes against their checksums: which are read, which are trusted as unchanged, and which blocks are wrong."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from k3ray.download.block_journal import digest_of, read_blocks
from k3ray.download.checksums import hash_file
from k3ray.download.hub import HubFile
from k3ray.download.reading import Reading
from k3ray.download.record import Record
from k3ray.download.verdict import Problem
from k3ray.download.workplace import Workplace

SMALL_BYTES = 64 << 20  # read in any case: a moment's work
SHOWN = 4


@dataclass(frozen=True, slots=True)
class ChecksumPlan:
    """to_read: will be hashed. trusted: unchanged since the checksum was right. unknown: will not be compared."""

    to_read: tuple[HubFile, ...]
    trusted: tuple[str, ...]
    unknown: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that will be read."""
        return sum(file.size for file in self.to_read)


def plan_checksums(
    workplace: Workplace,
    names: Iterable[str],
    known: dict[str, HubFile],
    record: Record | None,
    suspects: Iterable[str],
    deep: bool,
) -> ChecksumPlan:
    """Decide per file that is here. suspects: files that other checks found wrong, which are read in any case."""
    to_read, trusted, unknown, doubted = [], [], [], set(suspects)
    for name in sorted(names):
        file = known.get(name)
        if file is None:
            unknown.append(name)
            continue
        finished = record is not None and record.is_finished(workplace.directory, name)
        noted = record is not None and name in record.finished
        if deep or name in doubted or file.size <= SMALL_BYTES or (noted and not finished):
            to_read.append(file)
        elif finished:
            trusted.append(name)
        else:
            unknown.append(name)
    return ChecksumPlan(tuple(to_read), tuple(trusted), tuple(unknown))


def prove_checksums(workplace: Workplace, plan: ChecksumPlan, reading: Reading) -> tuple[list[Problem], list[str]]:
    """The problems, and the names of the files that are right, of those that are read."""

    def prove(file: HubFile) -> Problem | None:
        path = workplace.final(file.name)
        try:
            found = hash_file(path, file.checksum, reading.read)
        except OSError as error:
            return Problem(file.name, f"cannot be read ({error.strerror})")
        if found == file.checksum.value:
            return None
        kind, where = file.checksum.kind, wrong_blocks(workplace, file, reading)
        return Problem(file.name, f"its {kind} is {found}, expected {file.checksum.value}{where}")

    results = reading.threads(prove, plan.to_read)
    right = [file.name for file, problem in zip(plan.to_read, results, strict=True) if problem is None]
    return [problem for problem in results if problem is not None], right


def wrong_blocks(workplace: Workplace, file: HubFile, reading: Reading) -> str:
    """Which bytes of a damaged file are not those that the download wrote, by its journal; "" where it has none."""
    wrong = []
    blocks = read_blocks(workplace.journal(file.name), file.size, file.checksum)
    reading.expect(sum(block.end - block.begin for block in blocks))
    with workplace.final(file.name).open("rb", buffering=0) as data:
        for block in blocks:
            reading.read(block.end - block.begin)
            data.seek(block.begin)
            if digest_of(data.read(block.end - block.begin)) != block.digest:
                wrong.append(f"{block.begin}-{block.end - 1}")
    if not wrong:
        return ""
    more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    return f"; bytes {', '.join(wrong[:SHOWN])}{more} are not what was downloaded, only they are fetched again"
