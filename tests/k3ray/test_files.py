"""A user's file is whole or untouched, and a place that cannot be written is refused before the work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from k3ray.files import OutputFailure, check_writable, make_folder, write_file


def test_a_failed_write_leaves_the_old_file_and_nothing_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(b"old")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_write_replaces_with_the_usual_permissions(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_file(path, b"one")
    write_file(path, b"two")
    plain = tmp_path / "plain"
    plain.write_bytes(b"")
    assert path.read_bytes() == b"two"
    assert path.stat().st_mode == plain.stat().st_mode


def test_folders_that_cannot_be_made_or_take_no_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for folder, message in (
        (tmp_path / "file", r"DIR \S*/file: this is no folder"),
        (tmp_path / "none" / "folder", r"DIR \S*/none/folder: No such file or directory; name a folder"),
        (Path("/proc"), r"DIR.*: .* in /proc; name another place"),
    ):
        with pytest.raises(OutputFailure, match=message):
            make_folder(folder, "DIR")
    make_folder(tmp_path / "new", "DIR")
    assert list((tmp_path / "new").iterdir()) == []


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OutputFailure, match=r"--out .*: this is a folder"):
        check_writable(tmp_path, "--out")
    with pytest.raises(OutputFailure, match="does not exist; make it first"):
        check_writable(tmp_path / "none" / "run.json", "--out")
    with pytest.raises(OutputFailure, match=r"--out /proc/run\.json: "):
        check_writable(Path("/proc/run.json"), "--out")
    check_writable(tmp_path / "run.json", "--out")
    assert not list(tmp_path.iterdir())
