"""The folder that is downloaded to: made, locked against a second download, and large enough or refused."""

from __future__ import annotations

import errno
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from k3ray.amounts import decimal_size
from k3ray.download.block_journal import read_blocks
from k3ray.download.hub import HubFile
from k3ray.download.record import FOLDER
from k3ray.files import make_folder
from k3ray.workers.failure import Failure

MARGIN_BYTES = 64 << 20


class DownloadBusy(Failure):
    """Two downloads into one folder."""

    exit_code = 2


class NoSpace(Failure):
    """The disk cannot take what is missing."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Workplace:
    """Where files come to be: the model's folder, and the folder inside it for parts and journals."""

    directory: Path

    @property
    def inside(self) -> Path:
        """The folder of parts, journals and notes."""
        return self.directory / FOLDER

    def final(self, name: str) -> Path:
        """The finished file."""
        return self.directory / name

    def part(self, name: str) -> Path:
        """The unfinished file."""
        return self.inside / f"{name}.part"

    def journal(self, name: str) -> Path:
        """The journal of a file, finished or not."""
        return self.inside / f"{name}.blocks"

    def bytes_here(self, file: HubFile) -> int:
        """Bytes of an unfinished file that its journal records."""
        if not self.part(file.name).is_file():
            return 0
        blocks = read_blocks(self.journal(file.name), file.size, file.checksum)
        return sum(block.end - block.begin for block in blocks)

    def bytes_needed(self, file: HubFile) -> int:
        """Bytes that the disk must give for a file: not those that its part, or a file in its place, has already."""
        if self.owns(file.name):
            if _size(self.final(file.name)) == file.size:
                return 0
            if not self.part(file.name).is_file():
                return max(file.size - _allocated(self.final(file.name)), 0)
        return max(file.size - _allocated(self.part(file.name)), 0)

    def owns(self, name: str) -> bool:
        """Whether a file of that name is in the folder and nowhere else: through a link another one would be changed.

        A symbolic link, or a second name of the same file (as in the hub's cache, or a copy by links), is not.
        """
        try:
            found = self.final(name).lstat()
        except OSError:
            return False
        return stat.S_ISREG(found.st_mode) and found.st_nlink == 1

    def check_space(self, files: Iterable[HubFile]) -> None:
        """Raise NoSpace when the disk has less than these files still need."""
        needed = sum(map(self.bytes_needed, files))
        free = shutil.disk_usage(self.directory).free
        if needed and needed + MARGIN_BYTES > free:
            raise NoSpace(
                f"{self.directory}: {decimal_size(needed)} are still to be written and the disk has "
                f"{decimal_size(free)} free; name a folder on a larger disk, free "
                f"{decimal_size(needed + MARGIN_BYTES - free)}, or download part of the layers (--layers A-B)"
            )


@contextmanager
def occupied(directory: Path, option: str) -> Iterator[Workplace]:
    """Make the folder and hold it alone; raises DownloadBusy when another download has it, or OutputFailure."""
    make_folder(directory, option)
    workplace = Workplace(directory.resolve())
    make_folder(workplace.inside, option)
    if workplace.inside.is_symlink():
        raise DownloadBusy(f"{workplace.inside}: is a link, expected a folder on the disk of {directory}; remove it")
    lock = FileLock(workplace.inside / "lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise DownloadBusy(
            f"{directory}: another k3ray download is at work in this folder; wait for it, or end it first"
        ) from None
    except (OSError, NotImplementedError) as error:
        raise DownloadBusy(f"{directory}: cannot be locked against a second download ({error})") from None
    try:
        yield workplace
    finally:
        lock.release()


@contextmanager
def telling_disk(directory: Path, name: str) -> Iterator[None]:
    """What the disk refuses is told as NoSpace, with the file that was at work."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise NoSpace(
                f"{name}: {error.strerror} in {directory}; what was written is kept: free some space and "
                "run the same command again, or download part of the layers (--layers)"
            ) from None
        raise NoSpace(f"{name}: {error.strerror or error} in {directory}: it cannot be read or written there") from None


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _allocated(path: Path) -> int:
    try:
        stat = path.stat()
    except OSError:
        return 0
    return min(stat.st_size, stat.st_blocks * 512)
