"""The note in a downloaded folder, the room on its disk, and its lock."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from k3ray.download import workplace as workplace_module
from k3ray.download.checksums import Checksum
from k3ray.download.hub import HubFile
from k3ray.download.record import FOLDER, Record, RecordError, Stamp, new_record, read_record, write_record
from k3ray.download.workplace import DownloadBusy, NoSpace, Workplace, occupied
from k3ray.files import OutputFailure

SHA = Checksum("sha256", "ab" * 32)
COMMIT = "9f62e4e9fffbd0a83ddd60e1c209d828994b3569"


def test_a_note_reads_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    git = HubFile("config.json", 7, Checksum("git-sha1", "12" * 20))
    files = {"a.safetensors": HubFile("a.safetensors", 5, SHA), "config.json": git}
    record = Record(
        "some/one", COMMIT, files, frozenset({"config.json"}), {"config.json": Stamp(7, 123)}, frozenset({"x"})
    )
    write_record(tmp_path, record)
    assert read_record(tmp_path) == record
    assert read_record(tmp_path / "elsewhere") is None
    assert new_record(record.listing).finished == {}


@pytest.mark.parametrize("text", ["", "[]", '{"format": "k3ray download 2"}', "\0" * 100])
def test_a_note_that_is_damaged_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "record.json").write_text(text)
    with pytest.raises(
        RecordError, match=r"record\.json: .*remove \S*/record\.json to begin .* parts of files, are kept"
    ):
        read_record(tmp_path)


def test_room_is_asked_for_only_what_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Workplace(tmp_path)
    place.inside.mkdir()
    files = [HubFile(name, 1 << 30, SHA) for name in ("whole", "half", "none")]
    with (tmp_path / "whole").open("wb") as file:
        file.truncate(1 << 30)
    place.part("half").write_bytes(bytes(1 << 20))
    needed = (2 << 30) - (1 << 20)
    usage = shutil.disk_usage(tmp_path)
    for free, enough in ((needed + (64 << 20), True), (needed + (64 << 20) - 1, False)):
        monkeypatch.setattr(workplace_module.shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        if enough:
            place.check_space(files)
        else:
            with pytest.raises(NoSpace, match=r"2\.146 GB are still to be written and the disk has 2\.214 GB free"):
                place.check_space(files)


def test_one_at_a_time(tmp_path: Path) -> None:
    busy = pytest.raises(DownloadBusy, match="another k3ray download")
    with occupied(tmp_path / "new", "DIR"), busy, occupied(tmp_path / "new", "DIR"):
        pass
    with occupied(tmp_path / "new", "DIR"):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputFailure), occupied(tmp_path / "file", "DIR"):
        pass
