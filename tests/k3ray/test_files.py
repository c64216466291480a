"""A user's file is whole or untouched, and a place that cannot be written is refused before the work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from k3ray.files import OutputFailure, check_distinct, check_writable, make_folder, write_file, written_whole


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


def test_a_device_or_a_pipe_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    """Whoever may write to a folder of devices would otherwise lose /dev/null to a report."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/null")):
        with pytest.raises(OutputFailure, match=rf"--out {path}: this is a device or a pipe"):
            check_writable(path, "--out")
    with pytest.raises(OutputFailure, match="is not replaced by one"):
        write_file(pipe, b"new")
    assert pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]


def test_a_link_stays_and_its_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    link, lost = tmp_path / "run.json", tmp_path / "lost.json"
    link.symlink_to(tmp_path / "far" / "run.json")
    lost.symlink_to(tmp_path / "none" / "run.json")
    check_writable(link, "--out")
    write_file(link, b"new")
    assert link.is_symlink() and (tmp_path / "far" / "run.json").read_bytes() == b"new"
    with pytest.raises(OutputFailure, match="does not exist; make it first"):
        check_writable(lost, "--out")


def test_one_file_has_one_use(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    alias = tmp_path / "alias"
    alias.symlink_to(one)
    check_distinct({"--out": one, "--log": other, "--dump": None}, {"--ids-file": None})
    for same in (one, alias, tmp_path / "x" / ".." / "one"):
        with pytest.raises(OutputFailure, match=r"--log .*: this is also --out; name another file"):
            check_distinct({"--out": one, "--log": same}, {})
        with pytest.raises(OutputFailure, match=r"--out .*: this is also --prompt-file"):
            check_distinct({"--out": same}, {"--prompt-file": one})


def test_what_a_killed_writer_left_is_gone_before_the_work_and_before_the_write(tmp_path: Path) -> None:
    """A process killed while it writes leaves as much as it wrote, which the next one would lack."""
    path = tmp_path / "run.state"
    left = tmp_path / ".run.state.k3ray-abcdefgh"
    left.write_bytes(bytes(1000))
    check_writable(path, "--save-state")
    assert not left.exists()
    left.write_bytes(bytes(1000))
    write_file(path, b"new")
    assert list(tmp_path.iterdir()) == [path]
    with written_whole(path) as first:
        first.write(b"first")
        write_file(path, b"second")  # takes nothing from a writer that lives
    assert path.read_bytes() == b"first" and list(tmp_path.iterdir()) == [path]
