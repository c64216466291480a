"""Reads of a file past the page cache into memory of ours: whole pages, from any thread, complete or an error.

O_DIRECT is tried with a real read when a file is opened and may still be refused by a later one: the file is then read
through the page cache, and that is said once. Nothing is retried after an error: the caller knows what else it has.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from k3ray.workers.failure import Failure

PAGE_BYTES = 4096
MAX_READ_BYTES = 1 << 30  # Linux returns at most 0x7ffff000 bytes for one read
HUGE_PAGE_BYTES = 2 << 20
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)

Bytes = npt.NDArray[np.uint8]


class DiskReadFailure(Failure):
    """Bytes of a file that cannot be had. errno: of the failed call, None at the file's end."""

    def __init__(self, path: Path, offset: int, found: str, expected: str, number: int | None) -> None:
        self.path = path
        self.offset = offset
        self.errno = number
        super().__init__(f"{path}: found {found}, expected {expected}")


def slot_bytes(nbytes: int) -> int:
    """Bytes of a slot in which any nbytes of a file find room, wherever they begin."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES


def mapped(nbytes: int) -> Bytes:
    """Memory (nbytes,) u8 of zeros that begins on a page, in huge pages where the kernel has them.

    It is there when it is first touched, and goes back to the system with its last view. Raises OSError (ENOMEM).
    """
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= HUGE_PAGE_BYTES:
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8, count=nbytes)


def prefaulted(nbytes: int) -> Bytes:
    """Memory as `mapped` gives it, but there already: the first read into it is as fast as any later one."""
    memory = mapped(nbytes)
    memory[::PAGE_BYTES] = 0
    return memory


class DirectFile:
    """One file open for reading from any thread.

    `say` is told in one line when the file system refuses O_DIRECT. bytes_read and reads count what the system was
    asked for and gave.
    """

    def __init__(self, path: Path, say: Callable[[str], None] = lambda line: None) -> None:
        self.path = path
        self.bytes_read = 0
        self.reads = 0
        self._say = say
        self._lock = threading.Lock()
        self._open_descriptors: list[int] = []
        self._closing = weakref.finalize(self, _close_all, self._open_descriptors)
        self._direct = True
        self._descriptor = self._open(os.O_DIRECT)
        self.file_bytes = os.fstat(self._descriptor).st_size
        if self.file_bytes:
            # the probe: some file systems refuse only here
            self._fill(prefaulted(PAGE_BYTES), 0, min(self.file_bytes, PAGE_BYTES))
        self.bytes_read = self.reads = 0

    @property
    def direct(self) -> bool:
        """Whether reads go past the page cache."""
        return self._direct

    def read(self, slot: Bytes, offset: int, nbytes: int) -> Bytes:
        """Read nbytes at `offset` into the slot and return the view (nbytes,) u8 of them there.

        The slot begins on a page and holds the whole pages that the bytes touch: slot_bytes(nbytes) is always enough.
        Raises DiskReadFailure.
        """
        low = offset - offset % PAGE_BYTES
        high = -(-(offset + nbytes) // PAGE_BYTES) * PAGE_BYTES
        if slot.nbytes < high - low or slot.ctypes.data % PAGE_BYTES:
            raise ValueError(f"bytes {offset}..{offset + nbytes} need a slot of {high - low} bytes on a page")
        view = slot[offset - low : offset - low + nbytes]
        if self._direct:
            self._fill(slot[: high - low], low, offset + nbytes - low)
        else:
            self._fill(view, offset, nbytes)
        return view

    def close(self) -> None:
        """Close the file; reads that are under way in other threads must have ended."""
        self._closing()

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, flags: int) -> int:
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | flags)
        except OSError as error:
            if flags and error.errno in _REFUSALS:
                return self._fall_back(error)
            found = f"a file that cannot be opened ({error.strerror})"
            raise DiskReadFailure(self.path, 0, found, "a readable file: check the path", error.errno) from None
        self._open_descriptors.append(descriptor)
        return descriptor

    def _fall_back(self, error: OSError) -> int:
        """Read through the page cache from now on; the refused descriptor stays open for whoever reads with it."""
        self._direct = False
        self._descriptor = self._open(0)
        folder = self.path.parent
        self._say(f"{folder}: this disk refuses O_DIRECT ({error.strerror}); read through the page cache instead")
        return self._descriptor

    def _fill(self, target: Bytes, offset: int, needed: int) -> None:
        """Fill the first `needed` bytes of target; a read may give less than was asked for.

        O_DIRECT asks for whole pages, so for all of the target, and goes on at a page after a short read.
        """
        done = 0
        while done < needed:
            descriptor = self._descriptor
            try:
                count = os.preadv(descriptor, [target.data[done : done + MAX_READ_BYTES]], offset + done)
            except OSError as error:
                self._answer(error, descriptor, offset + done, needed - done)
                continue
            with self._lock:
                self.bytes_read += count
                self.reads += 1
            if self._direct and done + count < needed:
                count -= count % PAGE_BYTES
            if count == 0:
                found = f"the end of the file after byte {offset + done}"
                expected = f"{needed - done} more bytes: the file was cut or is being replaced, copy or make it again"
                raise DiskReadFailure(self.path, offset + done, found, expected, None)
            done += count

    def _answer(self, error: OSError, descriptor: int, offset: int, nbytes: int) -> None:
        """After a failed read: fall back when O_DIRECT was refused, also in another thread, else raise."""
        with self._lock:
            if error.errno in _REFUSALS and self._direct:
                self._fall_back(error)
        if error.errno in _REFUSALS and descriptor != self._descriptor:
            return
        name = errno.errorcode.get(error.errno or 0, str(error.errno))
        expected = f"{nbytes} bytes there: look at the disk (dmesg, smartctl) or use a copy on another one"
        found = f"{name} ({error.strerror}) at byte {offset}"
        raise DiskReadFailure(self.path, offset, found, expected, error.errno) from None


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
