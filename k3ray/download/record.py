"""What a download notes in the folder: the repository's commit, every file's checksum, and which files are finished.

Because the commit is noted, a resume cannot mix revisions; because the checksums are, a later proof needs no network.
Never holds a token or an address.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from k3ray.download.checksums import Checksum
from k3ray.download.hub import COMMIT, HubFile, Listing
from k3ray.files import write_file
from k3ray.workers.failure import Failure

FOLDER = ".k3ray-download"
NAME = "record.json"
FORMAT = "k3ray download 1"


class RecordError(Failure):
    """A note that cannot be read, or that belongs to another download."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Stamp:
    """A file as it was when its checksum was found right."""

    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Record:
    """One folder's download. finished: by name, the stamp at which the checksum was right.

    wanted: what is asked for now, and what is here of what was before.
    unproven: names in the repository whose size or checksum was not asked for yet.
    """

    repository: str
    commit: str
    files: dict[str, HubFile]
    wanted: frozenset[str] = frozenset()
    finished: dict[str, Stamp] = field(default_factory=dict)
    unproven: frozenset[str] = frozenset()

    @property
    def listing(self) -> Listing:
        """The hub's listing as it was noted."""
        return Listing(self.repository, self.commit, self.files, self.unproven - set(self.files))

    def is_finished(self, directory: Path, name: str) -> bool:
        """Whether a file is as it was when its checksum was right (its size and time of change, not its bytes)."""
        stamp = stamp_of(directory / name)
        return stamp is not None and stamp == self.finished.get(name)

    def with_finished(self, directory: Path, name: str) -> Record:
        """Note that a file's checksum is right now."""
        stamp = stamp_of(directory / name)
        assert stamp is not None, f"{name} was just written"
        return replace(self, finished={**self.finished, name: stamp})


def new_record(listing: Listing) -> Record:
    """The note of a download that begins."""
    return Record(listing.repository, listing.commit, listing.files, unproven=listing.unproven)


def stamp_of(path: Path) -> Stamp | None:
    """The size and time of change of a file, None where there is none."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return Stamp(stat.st_size, stat.st_mtime_ns)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    size: int
    checksum: str
    finished_mtime_ns: int | None = None


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    repository: str
    commit: str
    unproven: list[str]
    wanted: list[str]
    files: list[_File]


def read_record(directory: Path) -> Record | None:
    """The folder's note, None where there is none; raises RecordError."""
    path = directory / FOLDER / NAME
    advice = f"remove {path} to begin the notes anew: files that are right, and parts of files, are kept"
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecordError(f"{path}: cannot be read ({error.strerror}); {advice}") from None
    try:
        found = msgspec.json.decode(data, type=_Document)
    except msgspec.MsgspecError as error:
        raise RecordError(f"{path}: found something else than a download's note ({error}); {advice}") from None
    if found.format != FORMAT or not COMMIT.fullmatch(found.commit):
        raise RecordError(f"{path}: found format {found.format!r}, expected {FORMAT!r}; {advice}")
    files, finished = {}, {}
    for entry in found.files:
        checksum = Checksum.from_text(entry.checksum.rpartition(" ")[2])
        if checksum is None or entry.size < 0 or Path(entry.name).name != entry.name:
            raise RecordError(f"{path}: {entry.name!r} has no size and checksum; {advice}")
        files[entry.name] = HubFile(entry.name, entry.size, checksum)
        if entry.finished_mtime_ns is not None:
            finished[entry.name] = Stamp(entry.size, entry.finished_mtime_ns)
    wanted, unproven = frozenset(found.wanted), frozenset(found.unproven)
    return Record(found.repository, found.commit, files, wanted, finished, unproven)


def write_record(directory: Path, record: Record) -> None:
    """Write the note whole or not at all."""
    files = []
    for name, file in sorted(record.files.items()):
        stamp = record.finished.get(name)
        kept = stamp.mtime_ns if stamp is not None and stamp.size == file.size else None
        files.append(_File(name, file.size, str(file.checksum), kept))
    unproven, wanted = sorted(record.listing.unproven), sorted(record.wanted)
    document = _Document(FORMAT, record.repository, record.commit, unproven, wanted, files)
    write_file(directory / FOLDER / NAME, msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
