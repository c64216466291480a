"""What a killed writer left beside a file is removed by the next one; a living writer's is left alone."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from k3ray.workers.half_written import beside, folder_beside, prefix_beside, remove_abandoned

WRITER = """
import os, sys
from pathlib import Path
from k3ray.workers.half_written import beside, folder_beside, prefix_beside
path = Path(sys.argv[2])
if sys.argv[1] == "file":
    with beside(path.parent, prefix_beside(path)) as (file, written):
        file.write(bytes(1000))
        file.flush()
        os.kill(os.getpid(), 9)
else:
    with folder_beside(path) as written:
        (written / "shard").write_bytes(bytes(1000))
        os.kill(os.getpid(), 9)
"""


def killed_while_it_writes(kind: str, path: Path) -> Path:
    """What a process that was killed left beside the path."""
    before = set(path.parent.iterdir())
    done = subprocess.run([sys.executable, "-c", WRITER, kind, str(path)], timeout=60, check=False)
    assert done.returncode == -9
    (left,) = set(path.parent.iterdir()) - before
    return left


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_killed_writers_is_removed_by_the_next(kind: str, tmp_path: Path) -> None:
    path, other = tmp_path / "run.json", tmp_path / "run.jsonl"
    left, of_other = killed_while_it_writes(kind, path), killed_while_it_writes(kind, other)
    strangers = [tmp_path / ".run.json.original", tmp_path / "run.json"]
    for stranger in strangers:
        stranger.write_bytes(b"a user's")
    assert left.exists() and of_other.exists()
    with beside(tmp_path, prefix_beside(path)) as (_, written):
        assert not left.exists() and written.exists()
    assert set(tmp_path.iterdir()) == {of_other, *strangers}
    with folder_beside(other) as folder:
        assert set(tmp_path.iterdir()) == {folder, *strangers}
    assert set(tmp_path.iterdir()) == set(strangers)


def test_a_living_writers_stays(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with beside(tmp_path, prefix_beside(path)) as (file, written):
        file.write(b"first")
        with beside(tmp_path, prefix_beside(path)) as (_, other):
            assert other != written and other.exists() and written.exists()
        remove_abandoned(tmp_path, prefix_beside(path))
        file.flush()
        written.replace(path)
    with folder_beside(path) as folder:
        (folder / "shard").write_bytes(b"1")
        remove_abandoned(tmp_path, prefix_beside(path))
        assert (folder / "shard").exists()
    assert path.read_bytes() == b"first" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("moment", ["made", "locked by who removes it"])
def test_one_taken_for_abandoned_before_its_lock_is_made_again(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the making of a file and its lock another writer may look at it."""
    mkstemp, made = tempfile.mkstemp, []

    def looked_at(**wanted: Any) -> tuple[int, str]:
        descriptor, name = mkstemp(**wanted)
        if not made:
            if moment == "made":
                remove_abandoned(tmp_path, wanted["prefix"])
                assert not Path(name).exists()
            else:
                monkeypatch.setattr("fcntl.flock", lambda *_: blocked())
        made.append(name)
        return descriptor, name

    def blocked() -> None:
        monkeypatch.undo()
        Path(made[0]).unlink()
        made.append("blocked")
        raise BlockingIOError

    monkeypatch.setattr(tempfile, "mkstemp", looked_at)
    with beside(tmp_path, ".run.k3ray-") as (file, written):
        assert str(written) != made[0] and list(tmp_path.iterdir()) == [written]
        assert os.fstat(file.fileno()).st_nlink == 1
    assert len(made) == 2


def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"mine")
    link, pipe = tmp_path / ".run.k3ray-link", tmp_path / ".run.k3ray-pipe"
    link.symlink_to(tmp_path / "mine")
    os.mkfifo(pipe)
    remove_abandoned(tmp_path, ".run.k3ray-")
    assert {path.name for path in tmp_path.iterdir()} == {"mine", link.name, pipe.name}
    remove_abandoned(tmp_path / "nowhere", ".run.k3ray-")
