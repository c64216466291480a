"""The proof of folders with odd things in them: links to themselves, pipes, folders; and what a download leaves out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from k3ray.commands import download as download_command
from k3ray.commands import verify as command
from k3ray.download.record import FOLDER
from k3ray.download.revision import DownloadFailed
from k3ray.download.verdict import FAIL, Verdict
from k3ray.download.workplace import NoSpace
from k3ray.workers.checkpoint.index import open_index
from k3ray.workers.checkpoint.shard_files import CheckpointError
from tests.downloads import QUICK, SHARD, assert_exact, fetch, quicken
from tests.local_hub import Fault, LocalHub
from tests.verifying import prove

OTHER = "model-00004-of-000005.safetensors"


@pytest.fixture
def downloaded(hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    quicken(monkeypatch)
    fetch(hub, tmp_path / "model")
    return tmp_path / "model"


def problems(verdict: Verdict) -> dict[str, dict[str, str]]:
    return {
        found.check: {problem.file: problem.text for problem in found.problems}
        for found in verdict.findings
        if found.status == FAIL
    }


ODD: dict[str, tuple[Callable[[Path], None], str]] = {
    "itself": (lambda path: path.symlink_to(path.name), "cannot be read (Too many levels of symbolic links)"),
    "nowhere": (lambda path: path.symlink_to("nowhere"), "cannot be read (No such file or directory)"),
    "pipe": (lambda path: os.mkfifo(path), "is no file, but a pipe or a device"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is no file, but a pipe or a device"),
    "folder": (lambda path: path.mkdir(), "is missing"),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_stands_in_a_shards_place_and_is_none(hub: LocalHub, downloaded: Path, kind: str) -> None:
    """Named as such, never waited for, and not counted in bytes; a repair puts the shard there."""
    make, text = ODD[kind]
    (downloaded / SHARD).unlink()
    make(downloaded / SHARD)
    verdict = prove(downloaded)
    assert problems(verdict)["shard count"] == {SHARD: text}
    assert set(problems(verdict)) == {"shard count", "total size"} and verdict.fetch_again == [SHARD]
    rest = sum(len(hub.files[name]) for name in hub.files if name.endswith(".safetensors") and name != SHARD)
    (total,) = (found.detail for found in verdict.findings if found.check == "total size")
    assert total.startswith(f"{rest:,} of ")
    if kind == "folder":
        with pytest.raises(DownloadFailed, match="a folder is in its place"):
            command.run(downloaded, False, True, True, hub.endpoint, True)
    else:
        command.run(downloaded, False, True, True, hub.endpoint, True)
        assert_exact(hub, downloaded)


@pytest.mark.parametrize("name", ["notes", "more.safetensors"])
def test_a_link_to_itself_beside_the_shards(downloaded: Path, name: str) -> None:
    """It hides nothing: another program's is left alone, one that is named like a shard is told."""
    (downloaded / name).symlink_to(name)
    verdict = prove(downloaded)
    if name == "notes":
        assert verdict.passed
        assert len(open_index(downloaded)) == 1020
    else:
        assert problems(verdict) == {"shard count": {name: "cannot be read (Too many levels of symbolic links)"}}
        assert verdict.fetch_again == []
        with pytest.raises(CheckpointError, match=r"more\.safetensors: found a file that cannot be looked at"):
            open_index(downloaded)


def test_a_duplicate_of_a_shard_under_another_ones_name(downloaded: Path) -> None:
    shutil.copyfile(downloaded / SHARD, downloaded / OTHER)
    verdict = prove(downloaded)
    assert problems(verdict)["index against headers"] == {OTHER: f"holds the tensors of {SHARD}"}
    assert verdict.fetch_again == [OTHER]


def test_nothing_to_fetch_again_is_not_told_as_the_same_bytes(downloaded: Path) -> None:
    shutil.copyfile(downloaded / SHARD, downloaded / "more.safetensors")
    with pytest.raises(command.VerifyFailed, match="fetching again would not help: see the lines above"):
        command.run(downloaded, False, True, True, None, True)


def test_the_tokenizer_alone_is_proven_where_the_shards_are_not_all_here(
    hub: LocalHub, downloaded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was asked for by itself: the shards, whose proof reads 85 GB of the release, are another command's."""
    (downloaded / SHARD).unlink()
    download_command.run(downloaded, None, None, hub.endpoint, True, None, 4, False, 30, False)
    said = capsys.readouterr()
    assert "done: the tokenizer is in" in said.err.splitlines()[-1]
    assert "vocabulary" in said.out and "shard count" not in said.out
    assert problems(prove(downloaded))["shard count"] == {SHARD: "is missing"}


def test_a_repair_without_its_hub_ends_as_a_download_does(
    downloaded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (downloaded / SHARD).unlink()
    monkeypatch.setattr(command, "Patience", lambda: QUICK)
    with pytest.raises(DownloadFailed, match=rf"{SHARD}: given up at byte 0 .* the last: 127\.0\.0\.1:1: ConnectError"):
        command.run(downloaded, False, True, True, "http://127.0.0.1:1", True)
    assert DownloadFailed.exit_code == 1
    assert capsys.readouterr().out == ""


def test_a_note_that_is_removed_costs_no_part(hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a damaged note's message advises: the parts and their journals are found again."""
    quicken(monkeypatch)
    hub.faults = lambda asked: Fault("cut", 500_000 - asked.begin) if asked.name == SHARD else None
    with pytest.raises(DownloadFailed):
        fetch(hub, tmp_path)
    (tmp_path / FOLDER / "record.json").unlink()
    hub.faults = lambda asked: None
    hub.asked.clear()
    fetch(hub, tmp_path)
    assert_exact(hub, tmp_path)
    assert [(asked.name, asked.begin) for asked in hub.asked] == [(SHARD, 500_000)]


def test_a_part_of_the_layers_after_all_of_them_did_not_fit(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a full disk's message advises. The part is proven as one; what is here of the rest is proven with it."""
    quicken(monkeypatch)
    free = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free._replace(free=0))
    with pytest.raises(NoSpace, match="or download part of the layers"):
        fetch(hub, tmp_path)
    monkeypatch.undo()
    quicken(monkeypatch)
    fetch(hub, tmp_path, layers=range(8, 9))
    verdict = prove(tmp_path)
    assert verdict.passed and verdict.partial is not None
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    others = sorted({name for name in hub.files if name.endswith(".safetensors")} - set(shards))
    assert shards and others and verdict.partial == f"{len(shards)} of 5 shards were asked for"
    fetch(hub, tmp_path)
    (tmp_path / others[0]).unlink()
    fetch(hub, tmp_path, layers=range(8, 9))
    assert prove(tmp_path).passed  # what is gone was not asked for
    (tmp_path / others[1]).write_bytes(bytes(len(hub.files[others[1]])))
    fetch(hub, tmp_path, layers=range(8, 9))
    assert prove(tmp_path).fetch_again == [others[1]]  # what is here is proven, whoever asked for it
