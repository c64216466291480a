"""The proof of a folder: each kind of damage is named with its file, and what was not checked is said."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from k3ray.download import release
from k3ray.download.download import Wish, download
from k3ray.download.hub import Hub
from k3ray.download.patience import Patience
from k3ray.download.record import FOLDER
from k3ray.download.verdict import PASS, UNCHECKED
from k3ray.download.verification import verify
from tests.downloads import BLOCK
from tests.local_hub import LocalHub
from tests.verifying import (
    FOUR,
    ONE,
    THREE,
    TWO,
    break_scale,
    failed,
    flip,
    pad_header,
    prove,
    resize,
    statuses,
    swap,
)


def test_a_checkpoint_without_a_note_passes_and_says_what_was_not_checked(copied_model: Path) -> None:
    verdict = prove(copied_model)
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
def model_sized_alike(copied_model: Path) -> Path:
    """A checkpoint whose second and third shard have the same size, as most of the release's have."""
    sizes = {name: (copied_model / name).stat().st_size for name in (TWO, THREE)}
    larger = max(sizes.values())
    for name, size in sizes.items():
        if size < larger:
            pad_header(copied_model / name, larger - size)
    assert (copied_model / TWO).stat().st_size == (copied_model / THREE).stat().st_size
    (copied_model / "shard_sizes.txt").write_text(
        "".join(f"{p.name} {p.stat().st_size}\n" for p in copied_model.glob("*.safetensors"))
    )
    assert prove(copied_model).passed and statuses(prove(copied_model))["each size"] == PASS
    return copied_model


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


def test_a_nan_scale_is_named_with_its_tensor(copied_model: Path) -> None:
    name = break_scale(copied_model)
    verdict = prove(copied_model)
    assert failed(verdict) == {"NaN scales": [THREE]}
    assert f"{name}" in verdict.problems[0].text and "(1 bytes)" in verdict.problems[0].text


def test_part_of_a_model_passes_as_a_part(default_hub: LocalHub, tmp_path: Path) -> None:
    wish = Wish(tmp_path / "part", layers=range(8, 9))
    download(wish, Hub(default_hub.endpoint), Patience(), lambda _: None, lambda _: None)
    verdict = prove(wish.directory)
    assert verdict.passed and verdict.partial is not None and verdict.partial.endswith("of 5 shards were asked for")
    assert statuses(verdict)["text model"] == UNCHECKED


def test_a_tokenizer_alone_passes_as_what_it_is(default_hub: LocalHub, tmp_path: Path) -> None:
    wish = Wish(tmp_path / "tokenizer", tokenizer_only=True)
    download(wish, Hub(default_hub.endpoint), Patience(), lambda _: None, lambda _: None)
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


def test_a_check_of_nothing_is_no_pass(tmp_path: Path, k3b_dir: Path) -> None:
    assert PASS not in statuses(prove(tmp_path)).values()
    for name in ("config.json", "model.safetensors.index.json"):
        shutil.copyfile(k3b_dir / name, tmp_path / name)
    found = statuses(prove(tmp_path))
    assert {check for check, status in found.items() if status == PASS} == {"config", "index file"}
    assert {found[check] for check in ("headers", "index against headers", "NaN scales", "each size")} == {UNCHECKED}


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


def test_no_folder_and_an_empty_one(tmp_path: Path) -> None:
    from k3ray.workers.failure import Failure

    with pytest.raises(Failure, match="no folder that can be read"):
        prove(tmp_path / "nowhere")
    assert not prove(tmp_path).passed


def test_the_note_is_not_changed_by_a_proof(downloaded: Path) -> None:
    before = {path: path.read_bytes() for path in (downloaded / FOLDER).iterdir()}
    prove(downloaded, deep=True)
    assert {path: path.read_bytes() for path in (downloaded / FOLDER).iterdir()} == before
