"""Compilation of kernels: nothing at import, once for many processes, on any machine, never stale."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import types

from k3ray.kernels import compile as compiling
from k3ray.kernels.compile import Kernel, all_kernels, compile_all, kernel, readable, source_hash, writable

_F64 = types.float64


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of this test's own."""
    monkeypatch.setattr(compiling, "cache_directory", lambda: tmp_path)
    yield tmp_path


def _add(x: Any, y: Any, low: int, high: int) -> None:
    for i in range(low, high):
        y[i] += x[i]


def _fresh() -> Kernel:
    return kernel(types.void(readable(_F64, 1), writable(_F64, 1), types.int64, types.int64))(_add)


def _result(add: Kernel) -> list[float]:
    y = np.ones(3)
    add(np.arange(3.0), y, 0, 3)
    return y.tolist()


def _run(script: str, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA", "XDG"))}
    done = subprocess.run(
        [sys.executable, "-c", script], env=kept | environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_every_kernel_module_compiles_and_writes_nothing(tmp_path: Path) -> None:
    script = (
        "from k3ray.kernels.compile import all_kernels; print([k._dispatcher for k in all_kernels() if k._dispatcher])"
    )
    assert _run(script, NUMBA_CACHE_DIR=str(tmp_path)) == "[]"
    assert list(tmp_path.iterdir()) == []


def test_every_family_is_found() -> None:
    names = {found.function.__module__.rpartition(".")[2] for found in all_kernels()}
    assert {"dense", "mxfp4", "mxfp4_input"} <= names


def test_compile_all_a_second_time_does_nothing() -> None:
    compile_all()
    report = compile_all()
    assert (report.compiled, report.loaded) == (0, sum(not kernel.on_demand for kernel in all_kernels()))


def test_compiled_once_then_loaded(cache_folder: Path) -> None:
    first, second = _fresh(), _fresh()
    assert first.compile() is True
    assert first.compile() is False
    assert second.compile() is False
    assert _result(first) == _result(second) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("suffix", ["nbc", "nbi"])
@pytest.mark.parametrize("left", [0, 100])
def test_a_cache_file_cut_short_is_replaced(cache_folder: Path, suffix: str, left: int) -> None:
    _fresh().compile()
    (damaged,) = cache_folder.rglob(f"*.{suffix}")
    damaged.write_bytes(damaged.read_bytes()[:left])
    again = _fresh()
    assert again.compile() is True
    assert _result(again) == [1.0, 2.0, 3.0]
    assert _fresh().compile() is False


def test_without_any_folder_it_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "cache_directory", lambda: None)
    assert _result(_fresh()) == [1.0, 2.0, 3.0]


def test_a_full_disk_does_not_stop_it(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile._save_data", refuse)
    assert _result(_fresh()) == [1.0, 2.0, 3.0]


def test_read_only_and_unaligned_inputs_are_taken_as_they_are(cache_folder: Path) -> None:
    add = _fresh()
    unaligned = np.zeros(3 * 8 + 1, np.uint8)[1:].view(np.float64)
    unaligned[:] = [4.0, 5.0, 6.0]
    unaligned.flags.writeable = False
    assert unaligned.ctypes.data % 8
    y = np.ones(3)
    add(unaligned, y, 0, 3)
    assert y.tolist() == [5.0, 6.0, 7.0]


@pytest.mark.parametrize("x", [np.zeros(3, np.float32), np.zeros(6)[::2], np.zeros((3, 1)), [1.0, 2.0, 3.0]])
def test_other_types_are_refused_not_compiled(cache_folder: Path, x: Any) -> None:
    with pytest.raises(TypeError, match="No matching definition"):
        _fresh()(x, np.ones(3), 0, 3)


def test_read_only_output_is_refused(cache_folder: Path) -> None:
    y = np.ones(3)
    y.flags.writeable = False
    with pytest.raises(TypeError, match="No matching definition"):
        _fresh()(np.zeros(3), y, 0, 3)


def test_an_edit_in_any_source_moves_the_cache(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("a = 1\n")
    (tmp_path / "b.py").write_text("b = 1\n")
    before = source_hash(tmp_path)
    (tmp_path / "notes.txt").write_text("no source")
    assert source_hash(tmp_path) == before
    (tmp_path / "b.py").write_text("b = 2\n")
    edited = source_hash(tmp_path)
    (tmp_path / "b.py").rename(tmp_path / "c.py")
    assert len({before, edited, source_hash(tmp_path)}) == 3


def test_the_folder_is_named_by_the_hash_and_below_numbas(tmp_path: Path) -> None:
    script = "from k3ray.kernels.compile import cache_directory; print(cache_directory())"
    folder = Path(_run(script, NUMBA_CACHE_DIR=str(tmp_path)))
    assert folder == tmp_path / f"kernels-{source_hash(Path(compiling.__file__).parent)}"


def test_no_home_and_a_read_only_cache_fall_back_to_a_private_folder(tmp_path: Path) -> None:
    script = "from k3ray.kernels.compile import cache_directory; print(cache_directory())"
    surroundings = {"HOME": "/proc/none", "XDG_CACHE_HOME": "/proc/none", "TMPDIR": str(tmp_path)}
    folder = Path(_run(script, NUMBA_CACHE_DIR="/proc/none", **surroundings))
    assert folder.parent == tmp_path
    assert folder.name.startswith(f"k3ray-{os.getuid()}-kernels-")
    assert folder.stat().st_mode & 0o077 == 0


def test_a_folder_others_can_write_to_is_not_trusted(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    assert compiling._is_usable(shared)
    shared.chmod(0o777)
    assert not compiling._is_usable(shared)
    (tmp_path / "link").symlink_to(tmp_path)
    assert not compiling._is_usable(tmp_path / "link")
    assert not compiling._is_usable(Path("~/.cache/k3ray"))


def test_eight_processes_on_a_cold_cache_compile_once(tmp_path: Path) -> None:
    script = "from k3ray.kernels.dense import _pack; print(_pack.compile())"
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    processes = [
        subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    answers = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert sorted(answers) == ["False"] * 7 + ["True"]
