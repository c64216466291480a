"""Files of the user's that k3ray writes: checked before the work, written beside, flushed, renamed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from k3ray.workers.failure import Failure


class OutputFailure(Failure):
    """A file that cannot be written where the user wants it."""

    exit_code = 2


def check_writable(path: Path, option: str) -> None:
    """Refuse, before any work, a path that a file cannot be written to."""
    if path.is_dir():
        raise OutputFailure(f"{option} {path}: this is a folder; name a file")
    if not path.parent.is_dir():
        raise OutputFailure(f"{option} {path}: the folder {path.parent} does not exist; make it first")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise OutputFailure(f"{option} {path}: {error.strerror} in {path.parent}; name another place") from None


def make_folder(path: Path, option: str) -> None:
    """Make the folder where it is missing; refuse, before any work, one that cannot be written to."""
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise OutputFailure(f"{option} {path}: {error.strerror}; name a folder that can be made") from None
    check_writable(path / "new file", option)


def write_file(path: Path, contents: bytes) -> None:
    """Write the file whole or not at all: beside it first, flushed to the disk, then renamed over it."""
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
        Path(beside).chmod(0o666 & ~_umask())
        Path(beside).replace(path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


def _umask() -> int:
    current = os.umask(0o022)
    os.umask(current)
    return current
