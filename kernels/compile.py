"""How a kernel is compiled: explicit signatures, on first use, cached on disk under a hash of all kernel sources.

numba's own cache looks only at the file of the function itself: an intrinsic edited in another module would silently
go on as stale machine code, hence the hash in the folder's name. Importing a kernel module compiles nothing.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import pickle
import pkgutil
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numba
import platformdirs
from filelock import FileLock
from numba import types

_COMPILING = threading.RLock()


def readable(dtype: types.Type, ndim: int) -> types.Array:
    """The type of an array a kernel only reads: C-contiguous, read-only and unaligned buffers (Ray, mmap) included."""
    return types.Array(dtype, ndim, "C", readonly=True, aligned=False)


def writable(dtype: types.Type, ndim: int) -> types.Array:
    """The type of an array a kernel writes: C-contiguous memory of the caller."""
    return types.Array(dtype, ndim, "C")


def source_hash(folder: Path) -> str:
    """Hash of every source in the folder, so that an edit anywhere leaves no stale machine code behind."""
    digest = hashlib.sha256(f"{sys.version_info[:2]} {numba.__version__}".encode())
    for path in sorted(folder.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _candidates() -> Iterator[Path]:
    """Folders for this version's compiled kernels, best first; one may turn out not to be writable."""
    name = f"kernels-{source_hash(Path(__file__).parent)}"
    if numba.config.CACHE_DIR:
        yield Path(numba.config.CACHE_DIR) / name
    yield platformdirs.user_cache_path("k3ray") / name
    yield Path(tempfile.gettempdir()) / f"k3ray-{os.getuid()}-{name}"


def _is_usable(folder: Path) -> bool:
    """Whether files can be written and locked there, and nobody else could have put machine code there."""
    if not folder.is_absolute():  # no HOME and no passwd entry: platformdirs answers with a literal "~"
        return False
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & stat.S_IWOTH:
            return False
        with FileLock(folder / "lock"), tempfile.TemporaryFile(dir=folder):
            return True
    except (OSError, NotImplementedError):
        return False


@cache
def cache_directory() -> Path | None:
    """The folder of this version's compiled kernels; None when nothing at all is writable (then nothing is kept)."""
    try:
        for folder in _candidates():
            if _is_usable(folder):
                return folder
        return Path(tempfile.mkdtemp(prefix="k3ray-kernels-"))
    except OSError:  # not even a temporary folder
        return None


@contextmanager
def _compile_lock() -> Iterator[None]:
    """Held while compiling or loading: of eight processes on a cold cache one compiles and seven load."""
    directory = cache_directory()
    with _COMPILING, FileLock(directory / "lock") if directory else nullcontext():
        yield


def _dispatcher(function: Callable[..., Any], directory: Path | None) -> Any:
    """numba's dispatcher of `function`, caching in `directory` without moving anybody else's cache."""
    if directory is None:
        return numba.njit(nogil=True, error_model="numpy")(function)
    others = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(directory)
    try:
        return numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    finally:
        numba.config.CACHE_DIR = others


class Kernel:
    """A compiled function for its recorded signatures only; calling it with other types is a TypeError."""

    __slots__ = ("_dispatcher", "function", "on_demand", "signatures")

    def __init__(self, function: Callable[..., Any], signatures: tuple[Any, ...], on_demand: bool) -> None:
        self.function = function
        self.signatures = signatures
        self.on_demand = on_demand
        self._dispatcher: Any = None

    def __call__(self, *arguments: Any) -> Any:
        dispatcher = self._dispatcher
        if dispatcher is None:
            self.compile()
            dispatcher = self._dispatcher
        return dispatcher(*arguments)

    def compile(self) -> bool:
        """Compile, or load from the cache; True when something had to be compiled."""
        with _compile_lock():
            return self.compile_locked()

    def compile_locked(self) -> bool:
        """The same for a caller that holds the lock."""
        if self._dispatcher is not None:
            return False
        try:
            dispatcher = self._compiled(cache_directory())
        except (EOFError, pickle.UnpicklingError):  # files cut short by a full disk or a lost machine
            self._forget()
            dispatcher = self._compiled(cache_directory())
        except OSError:  # the cache became unreadable or full: go on without it
            dispatcher = self._compiled(None)
        dispatcher.disable_compile()
        self._dispatcher = dispatcher
        return bool(dispatcher.stats.cache_misses)

    def _compiled(self, directory: Path | None) -> Any:
        dispatcher = _dispatcher(self.function, directory)
        for signature in self.signatures:
            dispatcher.compile(signature)
        return dispatcher

    def _forget(self) -> None:
        directory = cache_directory()
        stem = Path(self.function.__code__.co_filename).stem
        for path in directory.rglob(f"{stem}.{self.function.__name__}-*.nb?") if directory else ():
            path.unlink(missing_ok=True)


def kernel(*signatures: Any, on_demand: bool = False) -> Callable[[Callable[..., Any]], Kernel]:
    """Make a function a kernel with these numba signatures (read-only inputs: `readable`, outputs: `writable`).

    on_demand: no model is run with it, so `compile_all` leaves it to its first use.
    """

    def decorate(function: Callable[..., Any]) -> Kernel:
        return Kernel(function, signatures, on_demand)

    return decorate


def inlined(function: Callable[..., Any]) -> Any:
    """Make a function that kernels call; LLVM inlines it, nothing is compiled or cached for it alone."""
    return numba.njit(nogil=True, error_model="numpy", forceinline=True)(function)


@dataclass(frozen=True, slots=True)
class CompileReport:
    """What `compile_all` did."""

    seconds: float
    compiled: int
    loaded: int


def all_kernels() -> list[Kernel]:
    """Every kernel of every module of this package; a new family is found without being entered anywhere."""
    package = __name__.rpartition(".")[0]
    names = sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]) if not module.ispkg)
    found: dict[int, Kernel] = {}
    for name in names:
        module = importlib.import_module(f"{package}.{name}")
        found.update((id(value), value) for value in vars(module).values() if isinstance(value, Kernel))
    return list(found.values())


def compile_all() -> CompileReport:
    """Compile every kernel that a model needs, or load it from the cache; other processes wait, then load."""
    started = time.perf_counter()
    kernels = [kernel for kernel in all_kernels() if not kernel.on_demand]
    with _compile_lock():
        compiled = sum(kernel.compile_locked() for kernel in kernels)
    return CompileReport(time.perf_counter() - started, compiled, len(kernels) - compiled)
