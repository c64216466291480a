"""k3ray verify: what it prints and refuses, and a repair that fetches exactly what is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from k3ray.commands import download as download_command
from k3ray.commands import verify as command
from k3ray.download.download import Wish, download
from k3ray.download.hub import Hub
from k3ray.download.patience import Patience
from tests.downloads import BLOCK
from tests.local_hub import LocalHub, serving
from tests.verifying import (
    FIVE,
    FOUR,
    ONE,
    THREE,
    TWO,
    break_scale,
    failed,
    flip,
    prove,
    swap,
)


@pytest.mark.parametrize(
    ("name", "damage", "check"),
    [
        ("config.json", b"{", "config"),
        ("model.safetensors.index.json", b'{"weight_map": 3}', "index file"),
        ("tiktoken.model", b"IQ== 0\n", "vocabulary"),
        ("tokenizer_config.json", b"{}", "vocabulary"),
        (FIVE, b"\xff" * 100, "headers"),
        (FIVE, b"", "headers"),
    ],
)
def test_a_damaged_file_is_named_and_repaired(
    default_hub: LocalHub, downloaded: Path, name: str, damage: bytes, check: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (downloaded / name).write_bytes(damage)
    verdict = prove(downloaded)
    assert name in failed(verdict)[check] and name in failed(verdict)["checksums"]
    assert verdict.fetch_again == [name]
    default_hub.asked.clear()
    command.run(downloaded, False, True, True, None, True)
    assert {asked.name for asked in default_hub.asked} == {name}
    assert (downloaded / name).read_bytes() == default_hub.files[name]
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] and found["repaired_bytes"] == len(default_hub.files[name])


def test_a_repair_fetches_only_the_damaged_blocks(
    default_hub: LocalHub, downloaded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(downloaded / TWO, 1_000_003)
    flip(downloaded / TWO, len(default_hub.files[TWO]) - 1)
    swap(downloaded / THREE, downloaded / FOUR)
    default_hub.asked.clear()
    command.run(downloaded, True, True, True, None, False)
    ranges = sorted((asked.begin, asked.end) for asked in default_hub.asked if asked.name == TWO)
    assert ranges == [(7 * BLOCK, 8 * BLOCK), (14 * BLOCK, len(default_hub.files[TWO]))]
    assert {asked.name for asked in default_hub.asked} == {TWO, THREE, FOUR}
    assert all((downloaded / name).read_bytes() == default_hub.files[name] for name in (TWO, THREE, FOUR))
    assert "PASS: 11 checks" in capsys.readouterr().err


def test_a_file_that_is_right_and_wrong_is_not_fetched_for_ever(
    default_hub: LocalHub, copied_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The repository itself holds a NaN scale: its checksum is right, so fetching it again is not proposed."""
    break_scale(copied_model)
    default_hub.files[THREE] = (copied_model / THREE).read_bytes()
    download(Wish(tmp_path / "there"), Hub(default_hub.endpoint), Patience(), lambda _: None, lambda _: None)
    verdict = prove(tmp_path / "there")
    assert failed(verdict) == {"NaN scales": [THREE]}
    assert verdict.fetch_again == []
    with pytest.raises(command.VerifyFailed, match="fetching again would not help"):
        download_command.run(tmp_path / "there", None, None, default_hub.endpoint, False, None, 4, False, 30, True)
    assert json.loads(capsys.readouterr().out)["verified"] is False


def test_deep_on_the_release_asks_the_hub_and_says_when_it_cannot(
    shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copyfile(shared_data / "k3-release" / "config.json", tmp_path / "config.json")
    with serving(LocalHub({"config.json": b"{}"})) as hub, pytest.raises(command.VerifyFailed):
        command.run(tmp_path, True, False, True, hub.endpoint, False)
    out = capsys.readouterr().out
    assert "checksums: config.json: its git-sha1 is" in out
    with pytest.raises(command.VerifyFailed):
        hub.refuse = lambda path, headers: (401, {})
        with serving(hub):
            command.run(tmp_path, True, False, True, hub.endpoint, False)
    assert "the checksums cannot be asked for: " in capsys.readouterr().err


def test_a_repair_of_what_came_from_nowhere_is_refused(copied_model: Path) -> None:
    (copied_model / THREE).unlink()
    with pytest.raises(command.RepairRefused, match="neither a download's note nor the release's"):
        command.run(copied_model, False, True, True, None, False)


def test_a_repair_of_a_folder_that_is_right_asks_nobody(copied_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command.run(copied_model, False, True, True, "http://127.0.0.1:9", False)
    assert "PASS: " in capsys.readouterr().err


def test_what_cannot_be_repaired_is_not_advised_to_be(copied_model: Path) -> None:
    (copied_model / THREE).unlink()
    with pytest.raises(command.VerifyFailed, match="copy them again, or k3ray download") as failure:
        command.run(copied_model, False, False, True, None, False)
    assert "--repair" not in str(failure.value)


def test_scales_may_be_left_out_and_it_is_said(copied_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    break_scale(copied_model)
    command.run(copied_model, False, False, False, None, False)
    said = capsys.readouterr()
    assert "left out: --no-scales" in said.out and "NaN scales" in said.err.splitlines()[-1]


def test_a_file_whose_name_commands_the_terminal_is_quoted(
    copied_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copyfile(copied_model / ONE, copied_model / "a\x1b[2J\nPASS.safetensors")
    with pytest.raises(command.VerifyFailed):
        command.run(copied_model, False, False, True, None, False)
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\nPASS" not in out and "a\\u001b[2J\\nPASS.safetensors" in out
