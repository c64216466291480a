"""The proof of a folder: each kind of damage is named with its file, and a repair fetches exactly what is wrong."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from k3ray.commands import download as download_command
from k3ray.commands import verify as command
from k3ray.download import release
from k3ray.download.download import Wish, download
from k3ray.download.hub import Hub
from k3ray.download.patience import Patience
from k3ray.download.record import FOLDER
from k3ray.download.verdict import FAIL, PASS, UNCHECKED, Verdict
from k3ray.download.verification import verify
from tests.downloads import BLOCK, quicken
from tests.local_hub import LocalHub, files_of, serving

ONE, TWO, THREE, FOUR, FIVE = (f"model-0000{number}-of-000005.safetensors" for number in range(1, 6))


@pytest.fixture
def model(k3b_dir: Path, tmp_path: Path) -> Path:
    """A copy of the golden checkpoint that nobody downloaded."""
    return Path(shutil.copytree(k3b_dir, tmp_path / "model", copy_function=shutil.copyfile))


@pytest.fixture
def hub(k3b_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    quicken(monkeypatch)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with serving(LocalHub(files_of(k3b_dir))) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        yield hub


@pytest.fixture(scope="module")
def download_of_k3b(k3b_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden checkpoint as a download leaves it, to be copied with its times of change."""
    wish = Wish(tmp_path_factory.mktemp("downloaded") / "model")
    with pytest.MonkeyPatch.context() as monkeypatch, serving(LocalHub(files_of(k3b_dir))) as hub:
        quicken(monkeypatch)
        download(wish, Hub(hub.endpoint), Patience(), lambda _: None, lambda _: None)
    return wish.directory


@pytest.fixture
def downloaded(download_of_k3b: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(download_of_k3b, tmp_path / "model"))


def prove(directory: Path, deep: bool = False) -> Verdict:
    return verify(directory, deep, None, lambda done, total: None)


def statuses(verdict: Verdict) -> dict[str, str]:
    return {found.check: found.status for found in verdict.findings}


def failed(verdict: Verdict) -> dict[str, list[str]]:
    """The files of the problems of every check that failed."""
    return {f.check: [p.file for p in f.problems] for f in verdict.findings if f.status == FAIL}


def flip(path: Path, place: int, keep_time: bool = False) -> None:
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    if keep_time:
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def resize(path: Path, by: int) -> None:
    """Change a file's size, growing or shrinking its last tensor's bytes."""
    data = path.read_bytes()
    path.write_bytes(data + bytes(by) if by > 0 else data[:by])


def swap(first: Path, second: Path) -> None:
    beside = first.with_name("beside")
    first.replace(beside)
    second.replace(first)
    beside.replace(second)


def test_a_checkpoint_without_a_note_passes_and_says_what_was_not_checked(model: Path) -> None:
    verdict = prove(model)
    assert verdict.passed and verdict.fetch_again == []
    assert {check for check, status in statuses(verdict).items() if status == UNCHECKED} == {
        "each size", "total size", "checksums"
    }  # fmt: skip


def test_a_download_passes_in_every_check(downloaded: Path) -> None:
    for deep in (False, True):
        assert set(statuses(prove(downloaded, deep)).values()) == {PASS}


def test_one_flipped_byte_is_named_with_its_block(downloaded: Path) -> None:
    flip(downloaded / TWO, 1_000_003)
    verdict = prove(downloaded)
    assert failed(verdict) == {"checksums": [TWO]} and verdict.fetch_again == [TWO]
    (problem,) = verdict.problems
    assert f"bytes {7 * BLOCK}-{8 * BLOCK - 1} are not what was downloaded" in problem.text


def test_a_flipped_byte_that_kept_its_time_is_found_by_deep(downloaded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k3ray.download.checksum_proof.SMALL_BYTES", 0)
    flip(downloaded / TWO, 1_000_003, keep_time=True)
    assert prove(downloaded).passed
    assert "(--deep reads them)" in prove(downloaded).findings[-1].detail
    assert failed(prove(downloaded, deep=True)) == {"checksums": [TWO]}


def test_a_swapped_pair_is_named_as_one(model_sized_alike: Path) -> None:
    swap(model_sized_alike / TWO, model_sized_alike / THREE)
    verdict = prove(model_sized_alike)
    texts = {problem.file: problem.text for problem in verdict.problems}
    assert failed(verdict)["index against headers"] == [TWO, THREE]
    assert texts[TWO] == f"holds the tensors of {THREE}, and {THREE} holds this one's: the two are swapped"
    assert texts[THREE] == f"holds the tensors of {TWO}, and {TWO} holds this one's: the two are swapped"


@pytest.fixture
def model_sized_alike(model: Path) -> Path:
    """A checkpoint whose second and third shard have the same size, as most of the release's have."""
    sizes = {name: (model / name).stat().st_size for name in (TWO, THREE)}
    larger = max(sizes.values())
    for name, size in sizes.items():
        if size < larger:
            pad_header(model / name, larger - size)
    assert (model / TWO).stat().st_size == (model / THREE).stat().st_size
    (model / "shard_sizes.txt").write_text(
        "".join(f"{p.name} {p.stat().st_size}\n" for p in model.glob("*.safetensors"))
    )
    assert prove(model).passed and statuses(prove(model))["each size"] == PASS
    return model


def pad_header(path: Path, count: int) -> None:
    """Make a shard longer by spaces after its header's JSON."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    path.write_bytes((length + count).to_bytes(8, "little") + data[8 : 8 + length] + b" " * count + data[8 + length :])


def test_two_wrong_sizes_that_cancel_are_both_named(downloaded: Path) -> None:
    resize(downloaded / TWO, 8)
    resize(downloaded / FOUR, -8)
    verdict = prove(downloaded)
    assert failed(verdict).get("each size") == [TWO, FOUR]
    assert statuses(verdict)["total size"] == PASS
    assert verdict.fetch_again == [TWO, FOUR]
    texts = [problem.text for found in verdict.findings if found.check == "each size" for problem in found.problems]
    assert texts == ["found 1,884,616 bytes, expected 1,884,608", "found 1,405,064 bytes, expected 1,405,072"]


def test_what_is_missing_and_what_is_too_many(downloaded: Path) -> None:
    (downloaded / THREE).unlink()
    shutil.copyfile(downloaded / ONE, downloaded / "other.safetensors")
    (downloaded / "gone.safetensors").symlink_to("nowhere")
    verdict = prove(downloaded)
    assert failed(verdict)["shard count"] == [THREE, "gone.safetensors", "other.safetensors"]
    assert verdict.fetch_again == [THREE]
    assert statuses(verdict)["text model"] == UNCHECKED


def test_a_nan_scale_is_named_with_its_tensor(model: Path) -> None:
    data = bytearray((model / THREE).read_bytes())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = next(name for name in header if name.endswith("w2.weight_scale"))
    data[8 + length + header[name]["data_offsets"][1] - 1] = 255
    (model / THREE).write_bytes(data)
    verdict = prove(model)
    assert failed(verdict) == {"NaN scales": [THREE]}
    assert f"{name}" in verdict.problems[0].text and "(1 bytes)" in verdict.problems[0].text


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
    hub: LocalHub, downloaded: Path, name: str, damage: bytes, check: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (downloaded / name).write_bytes(damage)
    verdict = prove(downloaded)
    assert name in failed(verdict)[check] and name in failed(verdict)["checksums"]
    assert verdict.fetch_again == [name]
    hub.asked.clear()
    command.run(downloaded, False, True, True, None, True)
    assert {asked.name for asked in hub.asked} == {name}
    assert (downloaded / name).read_bytes() == hub.files[name]
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] and found["repaired_bytes"] == len(hub.files[name])


def test_a_repair_fetches_only_the_damaged_blocks(
    hub: LocalHub, downloaded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(downloaded / TWO, 1_000_003)
    flip(downloaded / TWO, len(hub.files[TWO]) - 1)
    swap(downloaded / THREE, downloaded / FOUR)
    hub.asked.clear()
    command.run(downloaded, True, True, True, None, False)
    ranges = sorted((asked.begin, asked.end) for asked in hub.asked if asked.name == TWO)
    assert ranges == [(7 * BLOCK, 8 * BLOCK), (14 * BLOCK, len(hub.files[TWO]))]
    assert {asked.name for asked in hub.asked} == {TWO, THREE, FOUR}
    assert all((downloaded / name).read_bytes() == hub.files[name] for name in (TWO, THREE, FOUR))
    assert "PASS: 11 checks" in capsys.readouterr().err


def test_a_file_that_is_right_and_wrong_is_not_fetched_for_ever(
    hub: LocalHub, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The repository itself holds a NaN scale: its checksum is right, so fetching it again is not proposed."""
    test_a_nan_scale_is_named_with_its_tensor(model)
    hub.files[THREE] = (model / THREE).read_bytes()
    download(Wish(tmp_path / "there"), Hub(hub.endpoint), Patience(), lambda _: None, lambda _: None)
    verdict = prove(tmp_path / "there")
    assert failed(verdict) == {"NaN scales": [THREE]}
    assert verdict.fetch_again == []
    with pytest.raises(command.VerifyFailed, match="fetching again would not help"):
        download_command.run(tmp_path / "there", None, None, hub.endpoint, False, None, 4, False, 30, True)
    assert json.loads(capsys.readouterr().out)["verified"] is False


def test_part_of_a_model_passes_as_a_part(hub: LocalHub, tmp_path: Path) -> None:
    wish = Wish(tmp_path / "part", layers=range(8, 9))
    download(wish, Hub(hub.endpoint), Patience(), lambda _: None, lambda _: None)
    verdict = prove(wish.directory)
    assert verdict.passed and verdict.partial is not None and verdict.partial.endswith("of 5 shards were asked for")
    assert statuses(verdict)["text model"] == UNCHECKED


def test_a_tokenizer_alone_passes_as_what_it_is(hub: LocalHub, tmp_path: Path) -> None:
    wish = Wish(tmp_path / "tokenizer", tokenizer_only=True)
    download(wish, Hub(hub.endpoint), Patience(), lambda _: None, lambda _: None)
    verdict = prove(wish.directory)
    assert statuses(verdict) == {"vocabulary": PASS, "checksums": PASS}
    assert verdict.partial == "only the tokenizer was asked for"
    flip(wish.directory / "tiktoken.model", 5)
    assert prove(wish.directory).fetch_again == ["tiktoken.model"]


def test_the_releases_sizes_are_known_without_a_network(shared_data: Path, tmp_path: Path) -> None:
    """Files of the published sizes, empty inside: no size is wrong, every header is, and all of them are named."""
    released = shared_data / "k3-release"
    shutil.copyfile(released / "config.json", tmp_path / "config.json")
    with gzip.open(released / "model.safetensors.index.json.gz") as file:
        (tmp_path / "model.safetensors.index.json").write_bytes(file.read())
    sizes = release.read_release().sizes
    for name, size in sizes.items():
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    os.truncate(tmp_path / "model-00007-of-000096.safetensors", sizes["model-00007-of-000096.safetensors"] + 64)
    os.truncate(tmp_path / "model-00009-of-000096.safetensors", sizes["model-00009-of-000096.safetensors"] - 64)
    verdict = prove(tmp_path)
    assert failed(verdict)["each size"] == ["model-00007-of-000096.safetensors", "model-00009-of-000096.safetensors"]
    details = {found.check: found.detail for found in verdict.findings}
    assert details["each size"] == "96 compared with the sizes published for the release"
    assert details["total size"] == "1,560,936,091,448 of 1,560,936,091,448 bytes"
    assert failed(verdict)["headers"] == sorted(sizes)
    assert details["index file"] == "497,220 tensors in 96 shards"


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


def test_a_repair_of_what_came_from_nowhere_is_refused(model: Path) -> None:
    (model / THREE).unlink()
    with pytest.raises(command.RepairRefused, match="neither a download's note nor the release's"):
        command.run(model, False, True, True, None, False)


def test_a_repair_of_a_folder_that_is_right_asks_nobody(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command.run(model, False, True, True, "http://127.0.0.1:9", False)
    assert "PASS: " in capsys.readouterr().err


def test_what_cannot_be_repaired_is_not_advised_to_be(model: Path) -> None:
    (model / THREE).unlink()
    with pytest.raises(command.VerifyFailed, match="copy them again, or k3ray download") as failure:
        command.run(model, False, False, True, None, False)
    assert "--repair" not in str(failure.value)


def test_a_check_of_nothing_is_no_pass(tmp_path: Path, k3b_dir: Path) -> None:
    assert PASS not in statuses(prove(tmp_path)).values()
    for name in ("config.json", "model.safetensors.index.json"):
        shutil.copyfile(k3b_dir / name, tmp_path / name)
    found = statuses(prove(tmp_path))
    assert {check for check, status in found.items() if status == PASS} == {"config", "index file"}
    assert {found[check] for check in ("headers", "index against headers", "NaN scales", "each size")} == {UNCHECKED}


def test_scales_may_be_left_out_and_it_is_said(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    test_a_nan_scale_is_named_with_its_tensor(model)
    command.run(model, False, False, False, None, False)
    said = capsys.readouterr()
    assert "left out: --no-scales" in said.out and "NaN scales" in said.err.splitlines()[-1]


def test_reading_is_told_in_bytes_that_are_read(downloaded: Path) -> None:
    """The scales' bytes, then those whose checksum is compared: not the size of what is looked at."""
    scales = 0
    for shard in downloaded.glob("*.safetensors"):
        data = shard.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        ends = [entry["data_offsets"] for name, entry in header.items() if name.endswith(".weight_scale")]
        scales += sum(end - begin for begin, end in ends)
    told: list[tuple[int, int]] = []
    verify(downloaded, False, None, lambda done, total: told.append((done, total)))
    assert (0, scales) in told and (scales, scales) in told
    everything = scales + sum(path.stat().st_size for path in downloaded.iterdir() if path.is_file())
    assert told[-1] == (everything, everything)


def test_control_c_ends_every_thread_soon(downloaded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of 17 GB are read in several threads: they end at their next piece, not at their end."""
    monkeypatch.setattr("k3ray.download.checksums.READ_BYTES", 1000)
    pieces: list[int] = []

    def look(done: int, total: int) -> None:
        pieces.append(done)
        if len(pieces) == 40:
            signal.raise_signal(signal.SIGINT)  # Python handles it in the main thread, which waits
        time.sleep(0.002)

    with pytest.raises(KeyboardInterrupt):
        verify(downloaded, True, None, look, scales=False)
    assert len(pieces) < 1000  # of 9,000


def test_a_file_whose_name_commands_the_terminal_is_quoted(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copyfile(model / ONE, model / "a\x1b[2J\nPASS.safetensors")
    with pytest.raises(command.VerifyFailed):
        command.run(model, False, False, True, None, False)
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\nPASS" not in out and "a\\u001b[2J\\nPASS.safetensors" in out


def test_no_folder_and_an_empty_one(tmp_path: Path) -> None:
    from k3ray.workers.failure import Failure

    with pytest.raises(Failure, match="no folder that can be read"):
        prove(tmp_path / "nowhere")
    assert not prove(tmp_path).passed


def test_the_note_is_not_changed_by_a_proof(downloaded: Path) -> None:
    before = {path: path.read_bytes() for path in (downloaded / FOLDER).iterdir()}
    prove(downloaded, deep=True)
    assert {path: path.read_bytes() for path in (downloaded / FOLDER).iterdir()} == before
