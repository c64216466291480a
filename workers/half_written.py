"""Files and folders that are written beside their place: locked while their writer lives, removed when it is gone.

A process that is killed (kill -9, a lost machine) cannot remove what it had begun, which may be gigabytes. The lock
ends with the process, however it ends, so whoever writes next tells a dead one's work from a living one's.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


def prefix_beside(path: Path) -> str:
    """What the names of all that is written beside this path begin with; nobody else's files are called that."""
    return f".{path.name}.k3ray-"


@contextmanager
def beside(folder: Path, prefix: str) -> Iterator[tuple[BinaryIO, Path]]:
    """Give a new file of that prefix and where it is; at the end it is gone, unless it was renamed before.

    Those of the same prefix whose writers are gone are removed first. Raises OSError.
    """
    remove_abandoned(folder, prefix)
    descriptor, path = _new_file(folder, prefix)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file, path
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def folder_beside(directory: Path) -> Iterator[Path]:
    """Give a new folder beside the directory; at the end it is gone with all in it, unless it was renamed before.

    Those of the same directory whose writers are gone are removed first. Raises OSError.
    """
    remove_abandoned(directory.parent, prefix_beside(directory))
    path = directory.with_name(f"{prefix_beside(directory)}{os.getpid()}")
    path.mkdir()
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _hold(descriptor)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def remove_abandoned(folder: Path, prefix: str) -> None:
    """Remove what begins with the prefix, is ours and is held by no process; what cannot be told or removed stays."""
    found: list[Path] = []
    with suppress(OSError):
        found = list(folder.iterdir())
    for path in found:
        if path.name.startswith(prefix):
            with suppress(OSError):
                _remove_unheld(path)


def _remove_unheld(path: Path) -> None:
    """Raises OSError, of which BlockingIOError says that its writer lives."""
    status = path.lstat()
    mode = status.st_mode
    if status.st_uid != os.geteuid() or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        return
    access = os.O_RDONLY | os.O_DIRECTORY if stat.S_ISDIR(mode) else os.O_RDWR  # NFS locks only what may be written
    descriptor = os.open(path, access | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if stat.S_ISDIR(mode):
            shutil.rmtree(path)
        else:
            path.unlink()
    finally:
        os.close(descriptor)


def _new_file(folder: Path, prefix: str) -> tuple[int, Path]:
    """An open file that is held; another one where somebody took it for abandoned between its making and its lock."""
    while True:
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=prefix)
        if _hold(descriptor) and os.fstat(descriptor).st_nlink:
            return descriptor, Path(name)
        os.close(descriptor)


def _hold(descriptor: int) -> bool:
    """Lock what is open until it is closed; False where somebody else has it, who is about to remove it.

    Where the file system has no locks nothing is held, and nobody can take it for abandoned either.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
