"""Files of the user's that k3ray writes: checked before the work, written beside, flushed, renamed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from k3ray.workers.failure import Failure
from k3ray.workers.half_written import beside, prefix_beside, remove_abandoned


class OutputFailure(Failure):
    """A file that cannot be written where the user wants it."""

    exit_code = 2


def check_writable(path: Path, option: str) -> None:
    """Refuse, before any work, a path that a file cannot be written to: renaming over a device would remove it."""
    path = _followed(path)
    if path.is_dir():
        raise OutputFailure(f"{option} {path}: this is a folder; name a file")
    if path.exists() and not path.is_file():
        raise OutputFailure(f"{option} {path}: this is a device or a pipe, which a file cannot replace; name a file")
    if not path.parent.is_dir():
        raise OutputFailure(f"{option} {path}: the folder {path.parent} does not exist; make it first")
    _check_takes_files(path.parent, f"{option} {path}")
    remove_abandoned(path.parent, prefix_beside(path))  # it may take the room that the work is found to lack


def check_distinct(outputs: Mapping[str, Path | None], inputs: Mapping[str, Path | None]) -> None:
    """Refuse two outputs, or an output and an input, that are one file: the later would take the earlier's place."""
    places: dict[Path, str] = {path.resolve(): option for option, path in inputs.items() if path is not None}
    for option, path in outputs.items():
        if path is None:
            continue
        other = places.setdefault(path.resolve(), option)
        if other != option:
            raise OutputFailure(f"{option} {path}: this is also {other}; name another file")


def make_folder(path: Path, option: str) -> None:
    """Make the folder where it is missing; refuse, before any work, one that cannot be written to."""
    try:
        path.mkdir(exist_ok=True)
    except FileExistsError:
        raise OutputFailure(f"{option} {path}: this is no folder; name one, or one that can be made") from None
    except OSError as error:
        raise OutputFailure(f"{option} {path}: {error.strerror}; name a folder that can be made") from None
    _check_takes_files(path, option)


def _check_takes_files(folder: Path, named: str) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputFailure(f"{named}: {error.strerror} in {folder}; name another place") from None


def write_file(path: Path, contents: bytes) -> None:
    """Write the file whole or not at all."""
    with written_whole(path) as file:
        file.write(contents)


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """Give a file to write beside the path; at the end it is flushed to the disk and renamed over it, or removed.

    What a killed process left beside the path is removed first. A link stays, and what it points to is written.
    OutputFailure where the path is no place for a file.
    """
    path = _followed(path)
    if path.exists() and not path.is_file():
        raise OutputFailure(f"{path}: this is no file, and is not replaced by one; name another place")
    with beside(path.parent, prefix_beside(path)) as (file, written):
        yield file
        file.flush()
        os.fsync(file.fileno())
        written.chmod(0o666 & ~_umask())
        written.replace(path)
        _flush_folder(path.parent)


def _followed(path: Path) -> Path:
    """Where a link leads; any other path as it is."""
    return path.resolve() if path.is_symlink() else path


def _flush_folder(folder: Path) -> None:
    """Put the new name on the disk too, where the file system can."""
    with suppress(OSError):  # some file systems refuse it, and the file itself is safe
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _umask() -> int:
    current = os.umask(0o022)
    os.umask(current)
    return current
